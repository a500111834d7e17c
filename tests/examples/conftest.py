"""Examples are scripts: their folders go on the path, as they are when a script is run."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "gpt"), str(EXAMPLES / "memory_lab")]
