"""What a command hands around: a table's model, a network's model."""
