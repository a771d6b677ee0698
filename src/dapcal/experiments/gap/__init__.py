"""UCI gap: tables whose test rows lie where no training row does."""
