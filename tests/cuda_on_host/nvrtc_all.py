"""Compile the CUDA sources with NVRTC, which needs no GPU. `python tests/cuda_on_host/nvrtc_all.py` (`make nvrtc-all`)
compiles every three choices for sm_80, sm_90 and sm_100 and prints what each attention kernel needs.

There are 593,109 kernels of attention for each architecture. All of them would take two cores a week.
"""

from __future__ import annotations

import os
import re
import sys
import time
from itertools import product
from multiprocessing import Pool
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from covering import triples  # noqa: E402
from cuda_cases import Case  # noqa: E402

from kvdrift.kernels import cuda  # noqa: E402

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
SPILL = re.compile(r"(\d+) bytes spill stores")
REGISTERS = re.compile(r"Used (\d+) registers")


def missing() -> str | None:
    """Why NVRTC can't be used here, if it can't."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # CuPy raises whatever its loader met
        return f"NVRTC can't be loaded ({error}); install cupy-cuda13x and nvidia-cuda-nvrtc"
    return None


def compile_source(file: str, flags: tuple[str, ...], architecture: str) -> tuple[bytes, str]:
    """Machine code and the assembler's report, with the options that CuPy adds."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(cuda.source(file), file, (), ())
    try:
        nvrtc.compileProgram(
            program, ("-std=c++17", f"-arch={architecture}", "-ftz=true", "--ptxas-options=-v", *flags)
        )
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        raise AssertionError(f"{file} {architecture}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def compile_case(case: Case, architecture: str) -> str:
    """Compile every module of a case; return the assembler's report on attention."""
    layout = case.layout(kv_heads=8)
    constants = cuda.page_constants(layout, case.torch_dtype)
    tiles = cuda.row_tiles(case.head_dim, case.share, case.queries)
    pages = (*cuda.BIT_EXACT, *cuda.options(constants))
    attention = cuda.options(constants | {"SHARE": case.share, "TILES": tiles})
    report = ""
    for file, flags in (("seal.cu", pages), ("unseal.cu", pages), ("attention.cu", attention)):
        code, report = compile_source(file, flags, architecture)
        assert code[:4] == b"\x7fELF"
    return report


def described(work: tuple[Case, str]) -> str:
    """Compile a case for an architecture; say what its attention kernel needs."""
    case, architecture = work
    report = compile_case(case, architecture)
    registers, spills = max(map(int, REGISTERS.findall(report))), max(map(int, SPILL.findall(report)))
    return f"{case!s:50} {architecture:7} attention: {registers} registers, {spills} bytes spilled"


def main() -> None:
    reason = missing()
    if reason:
        sys.exit(reason)
    started = time.perf_counter()
    for architecture in ARCHITECTURES:
        compile_source("checksum.cu", cuda.BIT_EXACT, architecture)
    work = list(product(triples(), ARCHITECTURES))
    with Pool(os.cpu_count()) as pool:
        for i, line in enumerate(pool.imap(described, work), 1):
            print(f"{i:4} of {len(work)}: {line}", flush=True)
    print(f"{len(work)} compiled in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
