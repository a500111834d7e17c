"""Published exceptions."""


class DeprecatedException(Exception):
    """A function that is gone; the message says what to use."""
