"""The version of autoplan."""

__version__ = "0.1.0"
