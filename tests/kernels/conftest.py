"""test_native_out_of_sight.py asks of the native kernels what tests/cuda_on_host asks of the CUDA ones."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "cuda_on_host"))
