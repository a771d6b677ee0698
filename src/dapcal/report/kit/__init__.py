"""Drawing and writing: SVG charts, HTML, numbers as people read them; it knows nothing of models."""
