"""Cells: an error is found where it is made, at exactly that layer, bucket and tensor, and an exact cell costs nothing.

pytest tests/measure/test_cells.py
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvdrift.cache import sealing
from kvdrift.kernels.definition import SCALE_DTYPE
from kvdrift.measure import cells
from kvdrift.measure.buckets import bucket_ranges
from kvdrift.measure.cells import Variant, layer_cells, policy_cells
from kvdrift.measure.pages import through_pages
from kvdrift.measure.reference import Stored, run
from kvdrift.measure.tensors import errors
from kvdrift.measure.whole import whole_stack_kl
from kvdrift.policy import CachePolicy, LayerPolicy, Quantizer
from kvdrift.prompts.prompt import Prompt

LENGTH, STEPS = 192, 16
POLICY = CachePolicy(
    name="k8v8",
    block=32,
    layers=(LayerPolicy(Quantizer(bits=8, axis="channel", group=32), Quantizer(bits=8)),),
)


@pytest.fixture
def stored(llama: Any, tmp_path: Path) -> Stored:
    return store(llama, tmp_path)


def store(llama: Any, folder: Path) -> Stored:
    tokens = torch.randint(0, 97, (2, LENGTH + STEPS + 1), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = tuple(
        Prompt(
            id=f"p{row}",
            cohort="code",
            task="",
            split="evaluation",
            tokens=tuple(ids[:LENGTH]),
            roles=("text",) * LENGTH,
            continuation=tuple(ids[LENGTH:]),
            scored=STEPS + 1,
            answer="",
            max_new_tokens=0,
            depth=None,
            batch="b",
        )
        for row, ids in enumerate(tokens)
    )
    llama.set_attn_implementation("sdpa")
    tensors, _ = run(llama, prompts)
    llama.set_attn_implementation("kvdrift")
    save_file(tensors, folder / "b.safetensors")
    return Stored(folder / "b.safetensors", prompts)


def key_scales_off(monkeypatch: pytest.MonkeyPatch, layer: int, bucket: range) -> None:
    """The hook: after sealing, the key scales of one layer's blocks in one bucket are 10 % too large."""
    original = sealing._to_pages

    def wrong(backend: Any, binding: Any, pool: Any, starts: list[int], *tensors: Any) -> list[int]:
        pages = original(backend, binding, pool, starts, *tensors)
        key = binding.layout.key
        for page, start in zip(pages, starts, strict=True):
            if key.quantizer is not None and binding.index == layer and start in bucket:
                section = pool.arena[page, key.scales : key.scales + key.scales_bytes]
                scales = section.view(SCALE_DTYPE[key.quantizer.scale_dtype])
                scales.mul_(1.1)
        return pages

    monkeypatch.setattr(sealing, "_to_pages", wrong)


def test_an_injected_error_is_found_at_exactly_its_layer_bucket_and_tensor(llama, stored, monkeypatch):
    layers, bucket = 2, range(32, 128)
    policy = POLICY.bind(layers, 32)
    alone = {
        "key": LayerPolicy(key=policy.layers[0].key),
        "value": LayerPolicy(value=policy.layers[0].value),
    }

    def cells() -> dict[tuple[int, int, str], float]:
        found = {}
        for layer in range(layers):
            for tensor, pair in alone.items():
                only = replace(policy, layers=tuple(pair if i == layer else LayerPolicy() for i in range(layers)))
                spans = bucket_ranges(LENGTH)
                kls = layer_cells(llama, stored, 0, {layer: [Variant(only, tuple(spans))]}, STEPS)[layer][0].kl.mean(1)
                found |= {(layer, span.start, tensor): float(kl) for span, kl in zip(spans, kls, strict=True)}
        return found

    clean = cells()
    key_scales_off(monkeypatch, 1, bucket)
    spoilt = cells()
    changed = {cell for cell in clean if spoilt[cell] != clean[cell]}
    assert changed == {(1, 32, "key")}
    assert spoilt[1, 32, "key"] > 3 * clean[1, 32, "key"]
    assert max(spoilt, key=lambda cell: spoilt[cell] - clean[cell]) == (1, 32, "key")


def test_a_cell_that_packs_nothing_is_null_and_others_are_not(llama, stored):
    policy = replace(POLICY.bind(2, 32), residual_window=64)
    rows = [row for row in policy_cells(llama, stored, 0, policy, STEPS) if row["layer"] == 1]
    assert [row["bucket"] for row in rows] == [0, 32, 128]
    assert [row["kl"] is None for row in rows] == [False, False, True]
    assert (rows[1]["start"], rows[1]["stop"]) == (32, 128)


def test_the_exact_row_of_a_batch_is_the_models_own_path(llama, stored):
    """A variant with an empty range changes nothing: KL 0 to the last bit."""
    (found,) = layer_cells(llama, stored, 1, {0: [Variant(POLICY.bind(2, 32), (range(0),))]}, STEPS)[0]
    assert float(found.kl.abs().max()) == 0.0
    assert bool(found.same_top1.all())
    assert float(found.rank_correlation.min()) == 1.0
    assert found.kept is None


def test_cells_of_all_layers_at_once_are_those_of_each_layer_alone(llama, stored):
    """In one pass or two, over one chunk or two; and no cell sees another's tokens."""
    policy = POLICY.bind(2, 32)
    variants = {layer: [Variant(policy, tuple(bucket_ranges(LENGTH)))] for layer in range(2)}
    for steps in (8, STEPS):
        together = layer_cells(llama, stored, 0, variants, steps)
        for layer in range(2):
            (alone,) = layer_cells(llama, stored, 0, {layer: variants[layer]}, steps)[layer]
            torch.testing.assert_close(together[layer][0].kl, alone.kl, rtol=1e-3, atol=1e-7)
            assert together[layer][0].kl.shape == (3, steps)


def test_given_tokens_count_as_prefilled(llama, stored):
    """Cells behind the given tokens are those that all rows, fed these tokens too, show on the same steps."""
    variants = {layer: [Variant(POLICY.bind(2, 32), tuple(bucket_ranges(LENGTH)))] for layer in range(2)}
    behind = layer_cells(llama, stored, 0, variants, 6, given=10)
    for layer in range(2):
        (alone,) = layer_cells(llama, stored, 0, {layer: variants[layer]}, 6, given=10)[layer]
        torch.testing.assert_close(behind[layer][0].kl, alone.kl, rtol=1e-3, atol=1e-7)
        assert behind[layer][0].kl.shape == (3, 6)
        assert float(alone.kl.min()) > 0


def test_layers_without_cells_between_others_are_passed_through(llama, tmp_path):
    config = copy.deepcopy(llama.config)
    config.num_hidden_layers = 4
    torch.manual_seed(3)
    deeper = type(llama)(config).eval()
    stored = store(deeper, tmp_path)
    spans = tuple(bucket_ranges(LENGTH))
    variants = {layer: [Variant(POLICY.bind(4, 32), spans)] for layer in (0, 2)}
    found = layer_cells(deeper, stored, 0, variants, 6, given=10)
    assert found.keys() == {0, 2}
    for layer in (0, 2):
        (alone,) = layer_cells(deeper, stored, 0, {layer: variants[layer]}, 6, given=10)[layer]
        torch.testing.assert_close(found[layer][0].kl, alone.kl, rtol=1e-3, atol=1e-7)


def test_attention_that_tells_its_log_sum_exp_is_flash_attention_in_parts():
    """The path of devices whose flash kernel keeps the log-sum-exp to itself."""
    q, k, v = (torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(n)) for n in (7, 40, 41))
    flash = cells._with_lse(q, k, v[:, :, :40], 0.25)
    parts = [cells._scored(part, k, v[:, :, :40], 0.25) for part in q.split(3, dim=2)]
    for ours, theirs in zip(flash, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.cat(theirs, dim=2), rtol=1e-5, atol=1e-6)


def test_a_cell_equals_packing_that_cell_in_the_whole_model(llama, stored):
    """Against a plain forward pass through a cache in which only that layer packs, from another direction."""
    only = POLICY.bind(2, 32)
    only = replace(only, layers=(LayerPolicy(), only.layers[1]))
    (found,) = layer_cells(llama, stored, 0, {1: [Variant(only, (range(LENGTH),))]}, STEPS)[1]
    whole = whole_stack_kl(llama, [(stored, 0)], STEPS)(only)
    assert float(found.kl.mean()) == pytest.approx(whole, rel=0.02)


def test_a_cell_keeps_of_the_answer_what_the_exact_row_says_too(llama, stored):
    """The gold answer is what the exact model says but for one token, which therefore doesn't count."""
    llama.set_attn_implementation("sdpa")
    gold = stored.read("logits")[0][0].argmax(-1).tolist()
    llama.set_attn_implementation("kvdrift")
    answer = (stored.prompts[0].continuation[0], *gold[:3], 96 - gold[3], *gold[4:])
    prompt = replace(stored.prompts[0], task="number", continuation=answer, scored=9)
    asked = Stored(stored.path, (prompt, stored.prompts[1]))
    rough = CachePolicy(name="k2", block=32, layers=(LayerPolicy(key=Quantizer(bits=2)),)).bind(2, 32)
    (found,) = layer_cells(llama, asked, 0, {0: [Variant(rough, (range(0), range(LENGTH)))]}, STEPS)[0]
    assert found.kl.shape == (2, 8)
    same = found.same_top1[:, [0, 1, 2, 4, 5, 6, 7]].float().mean(1)
    assert found.kept is not None
    assert found.kept.tolist() == pytest.approx(same.tolist())
    assert found.kept[0] == 1.0 > found.kept[1]


def test_case_13_per_channel_keys_survive_an_outlier_channel(stored):
    """CASE 13: key channel 7 scaled by 50, 4 bits: per-token groups ruin the others, per-channel keys don't."""
    keys = torch.randn(2, 128, 64, generator=torch.Generator().manual_seed(0))
    keys[..., 7] *= 50
    others = [c for c in range(64) if c != 7]

    def relative(quantizer: Quantizer) -> float:
        from kvdrift.layout import block_layout

        pair = LayerPolicy(key=quantizer)
        policy = CachePolicy(name="x", layers=(pair,))
        decoded = through_pages(keys, keys, policy, block_layout(pair, 64, 2, 64, 4))
        return float(errors(keys[..., others], decoded.keys[..., others]).relative_l2.mean())

    assert relative(Quantizer(bits=4, axis="channel", group=64)) < 0.12
    assert relative(Quantizer(bits=4, axis="token", group=64)) > 0.6
