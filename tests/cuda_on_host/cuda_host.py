"""Compile a .cu source, unmodified, with the host's C++ compiler and run its kernels on CPU tensors.

`run_on_host` puts such kernels in the place of CuPy's, so that the Python side of `kernels/cuda.py` runs too.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvdrift.kernels import cuda

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")
FLAGS = "-std=c++17 -O1 -fPIC -shared -ffp-contract=off -fno-strict-aliasing -U_FORTIFY_SOURCE -w"
CTYPES = {np.int32: ctypes.c_int32, np.float32: ctypes.c_float}
CACHE = Path(tempfile.gettempdir()) / f"kvdrift-cuda-on-host-{os.getuid()}"


class HostKernel:
    """Called like a CuPy RawKernel."""

    max_dynamic_shared_size_bytes = preferred_shared_memory_carveout = 0

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], shared_mem: int) -> None:
        values = [CTYPES.get(type(arg), ctypes.c_int64)(arg.item() if hasattr(arg, "item") else arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.function((ctypes.c_uint32 * 3)(*grid), ctypes.c_int(block[0]), pointers)


class HostModule:
    """In the place of a CuPy RawModule."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def get_function(self, name: str) -> HostKernel:
        return HostKernel(self.library[f"run_{name}"])


@lru_cache(maxsize=512)
def module(file: str, flags: tuple[str, ...], device: torch.device) -> HostModule:
    """In the place of `cuda._module`; the library is cached by everything that makes it."""
    defines = [flag for flag in flags if flag.startswith("-D")]
    kernels = re.findall(r"__global__ void (?:__launch_bounds__\(.*\) )?(\w+)\(", cuda.source(file))
    text = f'#include "cuda_on_host.h"\n#include "{cuda.SOURCES / file}"\n' + "".join(f"HOST({n})\n" for n in kernels)
    content = [text, (HERE / "cuda_on_host.h").read_text(), cuda.source(file), FLAGS, defines]
    library = CACHE / f"{hashlib.sha256(repr(content).encode()).hexdigest()[:24]}.so"
    if not library.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            unit, built = Path(scratch) / "unit.cpp", Path(scratch) / "unit.so"
            unit.write_text(text)
            command = [str(COMPILER), *FLAGS.split(), *defines, f"-I{HERE}", str(unit), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            os.replace(built, library)  # whole or not at all, whoever else compiles the same
    return HostModule(library)


def run_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `kernels/cuda.py` compile and launch on the host for the length of a test."""
    if COMPILER is None:
        pytest.skip("no C++ compiler (g++ or clang++) to run the .cu sources with")
    monkeypatch.setattr(cuda, "_module", module)
    monkeypatch.setattr(cuda, "_kernel", cuda._kernel.__wrapped__)
    monkeypatch.setattr(cuda, "_checksum", cuda._checksum.__wrapped__)
    monkeypatch.setattr(cuda, "_attention", cuda._attention.__wrapped__)
    monkeypatch.setattr(cuda, "_on_stream", lambda device: nullcontext())
    monkeypatch.setattr(cuda, "_on_device", lambda device: nullcontext())
    monkeypatch.setattr(cuda, "_multiprocessors", lambda device: 2)
