"""The version, in the one place where the build reads it."""

__version__ = "0.1.0"
