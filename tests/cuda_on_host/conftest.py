"""`cache_cases` feeds a packed cache as the tests of the cache do."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "cache"))
