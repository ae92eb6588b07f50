"""test_native_out_of_sight.py asks of the native kernels what tests/cuda_on_host asks of the CUDA ones."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "cuda_on_host"))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The machine may be shared; what threads change is tested by name."""
    torch.set_num_threads(1)
