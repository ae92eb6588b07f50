"""The CUDA sources compile for every architecture, which needs no GPU. `make pairwise`: all pairs of choices."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from covering import held, pairwise, wanted
from cuda_cases import Case
from nvrtc_all import ARCHITECTURES, compile_case, compile_source, missing

from kvdrift.kernels import cuda

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
FAST = 6
ROUND = [(case, ARCHITECTURES[i % len(ARCHITECTURES)]) for i, case in enumerate(pairwise()[:FAST])]


@pytest.mark.parametrize(("case", "architecture"), ROUND, ids=str)
def test_case_compiles(case: Case, architecture: str) -> None:
    compile_case(case, architecture)


@pytest.mark.pairwise
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("case", pairwise(), ids=str)
def test_every_case_compiles_for(case: Case, architecture: str) -> None:
    compile_case(case, architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_checksum_compiles(architecture: str) -> None:
    compile_source("checksum.cu", cuda.BIT_EXACT, architecture)


def test_cases_hold_every_pair_and_every_number_of_row_tiles() -> None:
    pairs = set().union(*(held(asdict(case), 2) for case in pairwise()))
    assert pairs >= set(wanted(2))
    assert frozenset({("head_dim", 128), ("value_group", 64)}) in pairs
    assert {cuda.row_tiles(case.head_dim, case.share, case.queries) for case in pairwise()} == {1, 2, 3, 4}


def test_source_is_self_contained() -> None:
    """CuPy's kernel cache hashes the source it is given, and nothing that this would include."""
    for file in ("seal.cu", "unseal.cu", "checksum.cu", "attention.cu"):
        assert "#include" not in cuda.source(file)
