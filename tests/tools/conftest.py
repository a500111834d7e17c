"""Tools are scripts: their folder goes on the path, as it is when a script is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
