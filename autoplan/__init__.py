"""autoplan chooses how to train a large model on a cluster."""

__version__ = "0.1.0"
