"""MNIST and Fashion-MNIST: every method against images that it was not trained on."""
