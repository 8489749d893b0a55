"""The test of the sweep imports its modules by name, as `python tests/differential/sweep.py` does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
