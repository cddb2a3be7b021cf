"""Train a language model the same way on whatever hardware you have."""

__version__ = "0.1.0"
