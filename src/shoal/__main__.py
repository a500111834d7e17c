"""`python -m shoal` is the `shoal` command."""

import sys

from shoal.launch.cli import main

sys.exit(main())
