"""What holds for every test: one thread a process, no time limit on a property, and a Ctrl-C that works.

Ranks and the process that they are compared with sum in the same order only on equally many threads, and more threads
than cores only wait for each other.
"""

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every process that a test starts

from hypothesis import settings

settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")

# A shell starts background jobs with SIGINT ignored, and what they start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
