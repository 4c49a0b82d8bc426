"""Lets the tests of a folder share `desk_site`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
