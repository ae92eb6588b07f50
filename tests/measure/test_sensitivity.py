"""The sensitivity map: keys, values and both of a cell, and what a small needle set still says.

pytest tests/measure/test_sensitivity.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvdrift.cache.packed import PackedCache
from kvdrift.measure.cells import Variant, layer_cells
from kvdrift.measure.logits import kl
from kvdrift.measure.needles import answer_steps, needle_set
from kvdrift.measure.reference import Stored, run
from kvdrift.measure.sensitivity import SCHEMA, Probe, needle_rows, prompt_rows
from kvdrift.policy import CachePolicy, LayerPolicy, Quantizer
from kvdrift.prompts.prompt import Prompt

LENGTH, STEPS = 192, 16
PAIR = LayerPolicy(Quantizer(bits=2, axis="channel", group=32), Quantizer(bits=2))
POLICY = CachePolicy(name="rough", block=32, layers=(PAIR,), residual_window=16)
PROBES = [Probe("rough", POLICY, True), Probe("whole", POLICY, False)]


def prompt(name: str, length: int, depth: float | None, **others: Any) -> Prompt:
    known = {"cohort": "code", "task": "", "split": "evaluation", "tokens": (1,) * length, "roles": ("text",) * length}
    known |= {"continuation": (1,) * 17, "scored": 17, "answer": "", "max_new_tokens": 0, "batch": "b"}
    return Prompt(id=name, depth=depth, **(known | others))


def batch(*prompts: Prompt) -> Stored:
    return Stored(Path("nowhere"), prompts)


class Letters:
    """A token is a letter."""

    def decode(self, tokens: tuple[int, ...]) -> str:
        return "".join(map(chr, tokens))


@pytest.fixture
def stored(llama: Any, tmp_path: Path) -> Stored:
    ids = torch.randint(0, 97, (LENGTH + STEPS + 1,), generator=torch.Generator().manual_seed(1)).tolist()
    asked = prompt("p", LENGTH, 0.5, task="number", tokens=tuple(ids[:LENGTH]), continuation=tuple(ids[LENGTH:]))
    llama.set_attn_implementation("sdpa")
    for _ in range(10):  # each round one more token is what the model itself says
        tensors, _ = run(llama, [asked])
        asked = replace(asked, continuation=(ids[LENGTH], *tensors["logits"][0].argmax(-1).tolist()))
    tensors, _ = run(llama, [asked])
    llama.set_attn_implementation("kvdrift")
    save_file(tensors, tmp_path / "b.safetensors")
    return Stored(tmp_path / "b.safetensors", (asked,))


def test_the_needle_set_is_the_grid_at_the_shortest_length_that_packs() -> None:
    policy = CachePolicy(name="p", block=64, sink_tokens=16, residual_window=128, layers=(PAIR,))
    short = batch(prompt("a", 192, 0.5))
    grid = batch(prompt("b", 208, 0.1), prompt("text", 208, None), prompt("c", 208, 0.9))
    long = batch(prompt("d", 512, 0.5))
    assert needle_set([long, short, grid], policy) == [(grid, 0), (grid, 2)]
    assert needle_set([long, short], policy) == [(long, 0)]
    assert needle_set([short, batch(prompt("text", 512, None))], policy) == []


@pytest.mark.parametrize(
    ("said", "scored", "steps"),
    [
        ("code: 377.", 10, range(5, 8)),
        ("code: 377.", 9, range(5, 8)),
        ("code: 377.", 8, range(0)),
        ("377", 3, range(2)),  # the first token is the prefill's own
        ("3377377", 7, range(3)),
        ("none", 4, range(0)),
    ],
)
def test_the_answers_tokens_are_found_in_the_continuation(said: str, scored: int, steps: range) -> None:
    asked = prompt("p", 16, 0.5, continuation=tuple(map(ord, said)), scored=scored, answer="377")
    assert answer_steps(Letters(), asked) == steps


def test_what_is_given_is_prefilled_and_only_what_follows_is_scored(llama: Any, stored: Stored) -> None:
    """Against the model itself: the given tokens run over the exact cache, the rest over the cell's."""
    only = replace(POLICY.bind(2, 32), layers=(PAIR, LayerPolicy()))
    given, asked = 5, stored.prompts[0]
    (found,) = layer_cells(llama, stored, 0, {0: [Variant(only, (range(0), range(LENGTH)))]}, 4, given)[0]
    assert found.kl.shape == (2, 4)
    assert float(found.kl[0].abs().max()) < 1e-6
    exact = CachePolicy(name="exact", layers=(LayerPolicy(),))
    ids = torch.tensor([asked.tokens + asked.continuation[: given + 4]])

    def log_p(policy: CachePolicy) -> torch.Tensor:
        """Exact prefill of prefix and given tokens; only then the cell's blocks are read."""
        before = PackedCache(exact, llama.config, dtype=llama.dtype)
        stored.fill(before, llama.device)
        with torch.inference_mode():
            llama(input_ids=ids[:, LENGTH : LENGTH + given], cache=before, use_cache=True)
            cache = PackedCache(policy, llama.config, dtype=llama.dtype)
            keys = [layer_tensors(llama, ids[:, : LENGTH + given], index) for index in range(2)]
            for index, pair in enumerate(keys):
                cache.load_layer(index, *pair)
            out = llama(input_ids=ids[:, LENGTH + given :], cache=cache, use_cache=True)
        return out.logits.float().log_softmax(-1)

    direct = kl(log_p(exact), log_p(only))
    assert found.kl[1].tolist() == pytest.approx(direct[0].tolist(), rel=0.02)
    assert float(found.kl[1].max()) > 1e-4


def layer_tensors(llama: Any, ids: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact keys and values of one layer, from a plain forward pass."""
    from transformers import DynamicCache

    cache = DynamicCache(config=llama.config)
    llama.set_attn_implementation("sdpa")
    llama(input_ids=ids, cache=cache, use_cache=True)
    llama.set_attn_implementation("kvdrift")
    return cache.layers[layer].keys, cache.layers[layer].values


def test_keys_alone_values_alone_and_both_of_every_cell(llama: Any, stored: Stored) -> None:
    rows = prompt_rows(llama, stored, 0, PROBES, STEPS)
    assert {row["layer"] for row in rows} == {0, 1}
    rows = [row for row in rows if row["layer"] == 0]
    assert all(list(row) == list(SCHEMA) for row in rows)
    at = {(row["probe"], row["tensor"], row["bucket"]): row for row in rows}
    assert len(at) == len(rows)
    buckets = (None, 0, 32, 128)
    expected = {("rough", tensor, bucket) for tensor in ("key", "value", "both") for bucket in buckets}
    assert at.keys() == expected | {("whole", tensor, None) for tensor in ("key", "value")}
    for bucket in buckets:
        key, value, both = (at["rough", tensor, bucket] for tensor in ("key", "value", "both"))
        assert both["kl"] not in (key["kl"], value["kl"])
        assert both["cosine"] <= min(key["cosine"], value["cosine"])
        assert both["error"] >= max(key["error"], value["error"])
        assert (both["start"], both["stop"]) == (key["start"], key["stop"])
        assert both["kept"] is None
    only = replace(POLICY.bind(2, 32), layers=(PAIR, LayerPolicy()))
    (found,) = layer_cells(llama, stored, 0, {0: [Variant(only, (range(LENGTH),))]}, STEPS)[0]
    assert at["rough", "both", None]["kl"] == pytest.approx(float(found.kl.mean()), rel=1e-3)


FINE = replace(POLICY, name="fine", layers=(LayerPolicy(Quantizer(bits=8), Quantizer(bits=8)),))


def test_a_needle_is_asked_on_its_answer_in_cells_and_apart_where_something_is_lost(llama: Any, stored: Stored) -> None:
    chosen, buckets = [*PROBES, Probe("fine", FINE, True)], (0, 32, 128)
    rows = [row for row in needle_rows(llama, stored, 0, chosen, range(3, 8)) if row["layer"] == 0]
    assert all(list(row) == list(SCHEMA) and row["needle"] and row["kept"] is not None for row in rows)
    assert len(rows) == 4 * len(buckets)
    assert {(row["probe"], row["tensor"], row["bucket"]) for row in rows} == {
        (probe, tensor, bucket)
        for probe, tensor in (("rough", "both"), ("fine", "both"), ("rough", "key"), ("rough", "value"))
        for bucket in buckets
    }
    assert {row["kept"] for row in rows if row["probe"] == "fine"} == {1.0}
    only = replace(POLICY.bind(2, 32), layers=(PAIR, LayerPolicy()))
    spans = tuple(range(b, 4 * max(b, 8)) for b in buckets)
    (found,) = layer_cells(llama, stored, 0, {0: [Variant(only, spans)]}, 5, 3)[0]
    both = [row for row in rows if (row["probe"], row["tensor"]) == ("rough", "both")]
    assert found.kept is not None
    assert [row["kept"] for row in both] == pytest.approx(found.kept.tolist())
    assert [row["kl"] for row in both] == pytest.approx(found.kl.mean(1).tolist(), rel=1e-3)
    assert min(row["kept"] for row in both) < 1
