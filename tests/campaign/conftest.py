"""The test of the campaign imports its modules by name, as `python tests/campaign/run.py` does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
