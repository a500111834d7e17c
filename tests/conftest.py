"""No test is timed: a busy machine must not fail a property. And Ctrl-C works in every test, also in a background job."""

import signal

from hypothesis import settings

settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")

# A shell starts background jobs with SIGINT ignored, and what they start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
