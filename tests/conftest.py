"""Settings of every test: one thread a process, no deadline for hypothesis, and a default SIGINT handler.

Ranks and the reference process sum in the same order only with the same number of threads, and more threads than cores
slow each other down.
"""

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every process that a test starts

from hypothesis import settings

settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")

# A shell starts background jobs with SIGINT ignored, and what they start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
