"""The cases and checks are those of tests/cuda_on_host."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "cuda_on_host"))
