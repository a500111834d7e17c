"""No test is timed: a busy machine must not fail a property."""

from hypothesis import settings

settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")
