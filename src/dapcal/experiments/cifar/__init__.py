"""CIFAR-10: a wide residual network, every method and five networks, against images that they were not trained on."""
