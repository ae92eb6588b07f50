"""The cases and checks are those of tests/cuda_on_host, which feed a cache as tests/cache does."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / room) for room in ("cuda_on_host", "cache")]
