"""The version of this package, which is in no other place."""

__version__ = "0.1.0"
