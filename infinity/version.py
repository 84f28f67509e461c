"""The version of this package. No other file states the version."""

__version__ = "0.1.0"
