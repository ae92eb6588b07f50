"""The native kernels against the definition: `pytest tests/kernels/test_native.py`.

Codes, scales, lows, decoded values and checksums are compared bit for bit; attention with float64 attention over the
decoded values, relative to the largest value.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from attention_in_float64 import attention
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrift.kernels import compiler, definition
from kvdrift.layout import BlockLayout, block_layout
from kvdrift.policy import LayerPolicy, Quantizer

try:
    compiler.library()
except compiler.NativeUnavailable as error:
    pytest.skip(f"native kernels: {error}", allow_module_level=True)

from kvdrift.kernels import native

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BOUND = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""The stated bound, plus the rounding of the output."""

KIVI4 = LayerPolicy(Quantizer(bits=4, axis="channel", group=64), Quantizer(bits=4))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The machine may be shared; what threads change is tested by name."""
    torch.set_num_threads(1)


@st.composite
def quantizers(draw: st.DrawFn, head_dim: int, block: int, tensor: str) -> Quantizer | None:
    scale = draw(st.sampled_from(["float16", "float32"]))
    form = draw(st.sampled_from(["exact", "fp8", "token", "token", *(["channel"] * 3 if tensor == "key" else [])]))
    if form == "exact":
        return None
    groups = [0, *(group for group in (8, 16, 32, 64, 128, 256) if head_dim % group == 0)]
    if form == "fp8":
        return Quantizer("fp8_e4m3", 8, "token", draw(st.sampled_from(groups)), scale)
    if form == "channel":
        groups = [group for group in (8, 16, 32, 64, 128) if block % group == 0]
    return Quantizer("uniform", draw(st.sampled_from([2, 4, 8])), form, draw(st.sampled_from(groups)), scale)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[BlockLayout, torch.dtype]:
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    head_dim, block = draw(st.sampled_from([64, 80, 96, 112, 128, 256])), draw(st.sampled_from([32, 64, 128]))
    key, value = draw(quantizers(head_dim, block, "key")), draw(quantizers(head_dim, block, "value"))
    return block_layout(LayerPolicy(key, value), block, draw(st.integers(1, 3)), head_dim, dtype.itemsize), dtype


def spoil(x: torch.Tensor, how: str) -> torch.Tensor:
    """`x` [blocks, heads, tokens, channels] with one kind of trouble in it."""
    largest = torch.finfo(x.dtype).max
    match how:
        case "constant":
            x[:, :, :, 3], x[:, 0, 5] = -1.37, 0.1
        case "zero":
            x[0], x[:, :, 7] = 0.0, -0.0
        case "extreme":
            x[:, 0, 4, 2], x[:, 0, 4, 9] = largest, -largest
        case "denormal":
            x *= torch.finfo(x.dtype).smallest_normal
        case "tiny":
            x *= 1e-6
        case "halves":
            x.mul_(8).round_().div_(2)
        case "outlier":
            x[..., 7] *= 50
        case "infinite":
            x[-1, 0, 3, 1] = float("inf")
        case "nan":
            x[-1, -1, -1, -1] = float("nan")
    return x


TROUBLES = ["none", "constant", "zero", "extreme", "denormal", "tiny", "halves", "outlier", "infinite", "nan"]


def seal_both(
    keys: torch.Tensor, values: torch.Tensor, layout: BlockLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same blocks sealed by native and by the definition into arenas full of junk; their flags must agree."""
    pages = torch.randperm(len(keys) + 2)[: len(keys)].int()
    junk = torch.randint(0, 256, (len(keys) + 2, layout.page_bytes), dtype=torch.uint8)
    arenas = junk.clone(), junk.clone()
    fits = native.seal(keys, values, layout, arenas[0], pages)
    assert torch.equal(fits, definition.seal(keys, values, layout, arenas[1], pages))
    kept = pages[fits].long()
    assert torch.equal(arenas[0][kept], arenas[1][kept])
    return arenas[0], pages, fits


@settings(max_examples=150, deadline=None)
@given(layouts(), st.sampled_from(TROUBLES), st.sampled_from(TROUBLES), st.integers(0, 2**31), st.booleans())
def test_pages_equal_the_definition(
    layout: tuple[BlockLayout, torch.dtype], of_keys: str, of_values: str, seed: int, strided: bool
) -> None:
    """Cases 4, 5 and 6: every byte behind the header, and what doesn't fit, for every format, shape and trouble."""
    shape, dtype = layout
    torch.manual_seed(seed)
    size = (3, shape.kv_heads, shape.block, shape.head_dim)
    keys, values = (spoil(torch.randn(size).to(dtype), how) for how in (of_keys, of_values))
    if strided:  # as a cache hands them over: cut from [heads, tokens, channels], the heads' rows interleaved
        keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
    arena, pages, fits = seal_both(keys, values, shape)
    assert torch.equal(native.checksum(arena, pages), definition.checksum(arena, pages))
    headers, labelled = torch.randint(0, 256, (3, 64), dtype=torch.uint8), [arena.clone() for _ in range(2)]
    native.label(labelled[0], pages, headers)
    definition.label(labelled[1], pages, headers)
    assert torch.equal(*labelled)
    pages = pages[fits]
    for ours, theirs in zip(
        native.unseal(shape, arena, pages, dtype), definition.unseal(shape, arena, pages, dtype), strict=True
    ):
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(["float16", "bfloat16"]),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([(64, 32), (64, 64), (128, 64), (96, 64), (256, 128)]),
    st.sampled_from([0, 32, 64]),
    st.lists(
        st.one_of(
            st.integers(0, 2**16 - 1),
            st.integers(0x3000, 0x4100),
            st.integers(0xB000, 0xC100),
            st.sampled_from([0, 1, 0x7F, 0x80, 0x8000, 0x8001, 0x7BFF, 0xFBFF, 0x7C00, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF]),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 2**31),
)
def test_case_4_pages_of_any_sixteen_bits(
    dtype: str, bits: int, shape: tuple[int, int], group: int, words: list[int], seed: int
) -> None:
    """Groups of a few bit patterns: one sign or both, zeros of both signs, subnormals, infinities and NaNs of both."""
    torch.manual_seed(seed)
    head_dim, block = shape
    pool = torch.tensor(words, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    keys, values = (pool[torch.randint(0, len(words), (4, 2, block, head_dim))] for _ in range(2))
    keys[::2, ..., :5], values[::2, :, :5] = pool[0], pool[0]  # constant groups among the others
    policy = LayerPolicy(
        Quantizer(bits=bits, axis="channel", group=group if group and block % group == 0 else block),
        Quantizer(bits=bits, group=group if head_dim % (group or 1) == 0 else 0),
    )
    seal_both(keys, values, block_layout(policy, block, 2, head_dim, 2))


def test_case_4_half_steps_round_to_even() -> None:
    layout = block_layout(LayerPolicy(Quantizer(), Quantizer()), 32, 1, 64, 4)
    x = torch.arange(64).float().add(0.5).clamp(max=63).repeat(1, 1, 32, 1)
    x[..., 0], x[..., -1] = 0.0, 255.0  # low 0 and scale 1, so that a code is the rounded value
    arena, pages, fits = seal_both(x, x, layout)
    codes = arena[pages.long(), layout.key.codes : layout.key.codes + 64][0]
    assert fits.all()
    assert codes.tolist() == [0, *(round(i + 0.5) for i in range(1, 63)), 255]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([2, 4, 8]),
    st.integers(1, 2047),
    st.integers(-24, -2),
    st.sampled_from([*DTYPES]),
    st.integers(0, 99),
)
def test_case_4_half_steps_of_any_half_precision_scale(
    bits: int, mantissa: int, exponent: int, dtype: str, seed: int
) -> None:
    """A quotient that a reciprocal gives must round as a division does, above all half way between two codes."""
    torch.manual_seed(seed)
    scale, levels = mantissa * 2.0**exponent, 2**bits - 1
    x = torch.randint(0, 2 * levels + 1, (4, 2, 64, 64)) * (0.5 * scale)
    x[..., 0, :], x[..., 1, :], x[..., 0], x[..., 1] = 0.0, levels * scale, 0.0, levels * scale
    low = 2.0 ** random.Random(seed).randint(-10, 4)
    layout = block_layout(
        LayerPolicy(Quantizer(bits=bits, axis="channel", group=64), Quantizer(bits=bits)), 64, 2, 64, 4
    )
    seal_both((x + low).to(DTYPES[dtype]), x.to(DTYPES[dtype]), replace(layout, dtype_bytes=DTYPES[dtype].itemsize))


def test_case_6_a_span_beyond_half_precision() -> None:
    x = torch.randn(2, 1, 64, 64).half()
    x[:, 0, 10, 5], x[:, 0, 11, 5] = 60_000, -60_000
    layout = block_layout(KIVI4, 64, 1, 64, 2)
    arena, pages, fits = seal_both(x, x.clamp(-5, 5), layout)
    assert fits.all()
    assert all(decoded.isfinite().all() for decoded in native.unseal(layout, arena, pages, torch.float16))


def test_case_13_an_outlier_channel_ruins_tokens_not_channels() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 1, 64, 64)
    x[..., 7] *= 50

    def error(key: Quantizer) -> float:
        layout = block_layout(LayerPolicy(key), 64, 1, 64, 4)
        arena, pages, _ = seal_both(x, x, layout)
        others = torch.arange(64) != 7
        decoded = native.unseal(layout, arena, pages, torch.float32)[0]
        return float((decoded - x)[..., others].norm() / x[..., others].norm())

    assert error(Quantizer(bits=4, axis="channel", group=64)) < 0.12
    assert error(Quantizer(bits=4, axis="token", group=64)) > 0.9


@settings(max_examples=120, deadline=None)
@given(
    layouts(),
    st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8]),
    st.sampled_from([1, 1, 2, 16, 33]),
    st.lists(st.integers(0, 128), min_size=0, max_size=5),
    st.integers(0, 100),
    st.integers(0, 2**31),
)
def test_attention_is_near_float64(
    layout: tuple[BlockLayout, torch.dtype], share: int, queries: int, counts: list[int], spare: int, seed: int
) -> None:
    """Whole, short, skipped and absent blocks, ragged exact tails, every share and several queries of a sequence."""
    shape, dtype = layout
    torch.manual_seed(seed)
    blocks, heads, d = len(counts), shape.kv_heads, shape.head_dim
    arena = torch.zeros(2 * blocks + 1, shape.page_bytes, dtype=torch.uint8)
    pages = torch.randperm(2 * blocks + 1)[: 2 * blocks].int()
    if blocks:
        keys, values = (torch.randn(2 * blocks, heads, shape.block, d).to(dtype) for _ in range(2))
        assert native.seal(keys, values, shape, arena, pages).all()
    tokens = torch.tensor([counts, counts[::-1]], dtype=torch.int32).reshape(2, blocks).clamp(max=shape.block)
    pages = torch.where(tokens > 0, pages.reshape(2, blocks), 2**30)  # a skipped block's page is never looked at
    exact = [torch.randn(2, queries + spare + 3, heads, d).to(dtype).transpose(1, 2) for _ in range(2)]
    lengths = torch.tensor([queries + spare, queries], dtype=torch.int32)
    query = torch.randn(2, queries, heads * share, d).to(dtype).transpose(1, 2)
    arguments = (query, shape, arena, pages, tokens, *exact, lengths, d**-0.5)
    error = (native.decode_attention(*arguments).double() - attention(*arguments)).abs().max()
    assert error <= BOUND[dtype] * max(5.0, float(exact[1].float().abs().max()))


@pytest.mark.parametrize("policy", [KIVI4, LayerPolicy(Quantizer(), Quantizer())], ids=["kivi4", "int8"])
def test_case_10_error_does_not_grow_with_length(policy: LayerPolicy) -> None:
    """1k to 64k tokens, and one of them, far back, that the query looks for."""
    torch.manual_seed(0)
    layout = block_layout(policy, 64, 1, 64, 4)
    keys, values = torch.randn(1024, 1, 64, 64), torch.randn(1024, 1, 64, 64)
    needle = keys[3, 0, 11].clone()
    arena = torch.zeros(1024, layout.page_bytes, dtype=torch.uint8)
    assert native.seal(keys, values, layout, arena, torch.arange(1024, dtype=torch.int32)).all()
    query = torch.stack([torch.randn(64), 1.5 * needle])[None, :, None]
    exact, lengths = torch.randn(1, 1, 1, 64), torch.ones(1, dtype=torch.int32)
    errors = []
    for blocks in (16, 128, 1024):
        pages = torch.arange(blocks, dtype=torch.int32)[None]
        arguments = (query, layout, arena, pages, torch.full_like(pages, 64), exact, exact, lengths, 64**-0.5)
        out = native.decode_attention(*arguments)
        errors.append(float((out.double() - attention(*arguments)).abs().max()))
    assert max(errors) < 5e-6, errors
    assert errors[-1] <= 2 * errors[0] + 5e-7, errors


def test_one_thread_and_two_agree() -> None:
    torch.manual_seed(0)
    layout = block_layout(KIVI4, 64, 2, 64, 4)
    x = torch.randn(40, 2, 64, 64)
    arena, pages, _ = seal_both(x, x, layout)
    query, exact = torch.randn(1, 6, 1, 64), torch.randn(1, 2, 8, 64)
    tokens, lengths = torch.full((1, 40), 64, dtype=torch.int32), torch.tensor([8], dtype=torch.int32)
    outputs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        again = torch.zeros_like(arena)
        assert native.seal(x, x, layout, again, pages).all()
        assert torch.equal(again[pages.long(), 64:], arena[pages.long(), 64:])
        outputs.append(native.decode_attention(query, layout, arena, pages[None], tokens, exact, exact, lengths, 0.125))
    assert torch.allclose(*outputs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernels", [native, definition], ids=["native", "definition"])
@pytest.mark.parametrize("share", [1, 3])
def test_what_is_not_finite_spoils_only_the_queries_that_see_it(kernels: ModuleType, share: int) -> None:
    torch.manual_seed(0)
    layout = block_layout(KIVI4, 64, 2, 64, 4)
    arena, pages, _ = seal_both(torch.randn(1, 2, 64, 64), torch.randn(1, 2, 64, 64), layout)
    query, keys, values = torch.randn(1, 2 * share, 3, 64), torch.randn(1, 2, 20, 64), torch.randn(1, 2, 20, 64)

    def answer(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        tables = pages[None], torch.tensor([[64]], dtype=torch.int32)
        return kernels.decode_attention(
            query, layout, arena, *tables, keys, values, torch.tensor([20], dtype=torch.int32), 0.125
        )

    clean = answer(keys, values)
    for spoiled, bad in ((keys, "nan"), (values, "nan"), (values, "inf")):
        tensors = [x.clone() for x in (keys, values)]
        tensors[spoiled is values][:, :, -1] = float(bad)
        out = answer(*tensors)
        assert torch.equal(out[:, :, :2], clean[:, :, :2])
        assert not out[:, :, 2].isfinite().any()


def test_an_unknown_format_is_refused() -> None:
    unknown = Quantizer()
    object.__setattr__(unknown, "format", "nf4")
    layout = block_layout(LayerPolicy(unknown, unknown), 32, 1, 64, 4)
    x, arena = torch.zeros(1, 1, 32, 64), torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
    for kernels in (native, definition):
        with pytest.raises(ValueError, match="'nf4'; allowed: uniform, fp8_e4m3"):
            kernels.seal(x, x, layout, arena, torch.zeros(1, dtype=torch.int32))


def test_dtypes_that_differ_are_refused() -> None:
    layout = block_layout(KIVI4, 64, 1, 64, 4)
    arena, none = torch.zeros(1, layout.page_bytes, dtype=torch.uint8), torch.zeros(1, 0, dtype=torch.int32)
    exact, lengths = torch.zeros(1, 1, 1, 64, dtype=torch.float16), torch.ones(1, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"query is torch\.float32, exact keys torch\.float16"):
        native.decode_attention(torch.zeros(1, 1, 1, 64), layout, arena, none, none, exact, exact, lengths, 1.0)


TWO_AT_ONCE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import test_native as t
t.test_pages_equal_the_definition.hypothesis.inner_test(t.PORTABLE_LAYOUT, "outlier", "constant", 0, True)
t.test_attention_is_near_float64.hypothesis.inner_test(t.PORTABLE_LAYOUT, 3, 2, [64, 0, 7], 70, 0)
"""
PORTABLE_LAYOUT = (block_layout(KIVI4, 64, 2, 64, 4), torch.float32)


def test_two_processes_compile_at_once(tmp_path: Path) -> None:
    """Both get a working library, here of the path for CPUs without AVX-512, and one file is left."""
    here = Path(__file__).parent
    environment = {**os.environ, "KVDRIFT_CACHE": str(tmp_path), "KVDRIFT_CXXFLAGS": "-DKVDRIFT_PORTABLE -O1"}
    environment["PYTHONPATH"] = str(here.parents[1])
    processes = [
        subprocess.Popen([sys.executable, "-c", TWO_AT_ONCE, str(here)], env=environment, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]
