"""The CUDA sources compile for every architecture; NVRTC needs no GPU. `-m slow` compiles all pairs of choices."""

from __future__ import annotations

import pytest
from cuda_cases import Case, pairwise
from nvrtc_all import ARCHITECTURES, compile_case, compile_source, missing

from kvdrift.kernels import cuda

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
FAST = 9
ALL = [(case, ARCHITECTURES[i % len(ARCHITECTURES)]) for i, case in enumerate(pairwise())]


@pytest.mark.parametrize(("case", "architecture"), ALL[:FAST], ids=str)
def test_case_compiles(case: Case, architecture: str) -> None:
    compile_case(case, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("case", pairwise(), ids=str)
def test_every_case_compiles_for(case: Case, architecture: str) -> None:
    compile_case(case, architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_checksum_compiles(architecture: str) -> None:
    compile_source("checksum.cu", cuda.BIT_EXACT, architecture)


def test_source_is_self_contained() -> None:
    """CuPy's kernel cache hashes the source it is given, and nothing that this would include."""
    for file in ("seal.cu", "unseal.cu", "checksum.cu", "attention.cu"):
        assert "#include" not in cuda.source(file)
