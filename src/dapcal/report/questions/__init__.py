"""One file answers one question of a reader: `measure` computes plain numbers, `section` shows them."""
