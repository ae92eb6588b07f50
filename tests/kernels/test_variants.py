"""The native kernels as other CPUs have them, on this one: `pytest tests/kernels/test_variants.py`.

Each variant is compiled and run in a process of its own, both side by side, on what test_native.py and
test_native_attention.py draw.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvdrift.kernels import compiler

try:
    compiler.library()
except compiler.NativeUnavailable as error:
    pytest.skip(f"native kernels: {error}", allow_module_level=True)

HERE = Path(__file__).parent
VARIANTS = {"without AVX-512": "-DKVDRIFT_PORTABLE -O1", "without VNNI": "-DKVDRIFT_NO_VNNI -O1"}

RUN = """
import sys
sys.path.insert(0, sys.argv[1])
import test_native_attention, test_native, torch
from hypothesis import given, settings
torch.set_num_threads(1)
for drawn, test in (
    (test_native.PAGES, test_native.test_pages_equal_the_definition),
    (test_native.SIXTEEN_BITS, test_native.test_case_4_pages_of_any_sixteen_bits),
    (test_native_attention.ATTENTION, test_native_attention.test_attention_is_near_float64),
):
    settings(max_examples=60, deadline=None, derandomize=True)(given(*drawn)(test.hypothesis.inner_test))()
"""


def test_pages_equal_the_definition_and_attention_is_near_float64(tmp_path: Path) -> None:
    """Every format, both axes, every head_dim, dtype and trouble."""
    processes = {}
    for variant, flags in VARIANTS.items():
        environment = {**os.environ, "KVDRIFT_CACHE": str(tmp_path / variant), "KVDRIFT_CXXFLAGS": flags}
        environment["PYTHONPATH"] = str(HERE.parents[1])
        command = [sys.executable, "-c", RUN, str(HERE)]
        processes[variant] = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    errors = {variant: process.communicate(timeout=300)[1] for variant, process in processes.items()}
    for variant, process in processes.items():
        assert process.returncode == 0, f"{variant}: {errors[variant]}"
        assert len(list((tmp_path / variant).iterdir())) == 1
