"""Two moons and the sinusoid: problems of seconds, on which every posterior can be tried and seen."""
