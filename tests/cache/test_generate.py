"""`generate()` with a PackedCache, and models it can't serve:  pytest tests/cache/test_generate.py"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from stream import KEY4, VALUE4, Stream, config, policy, stream, tokens
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

from kvdrift.cache import attention
from kvdrift.cache.packed import PackedCache
from kvdrift.cache.pool import PoolExhausted
from kvdrift.ledger import load_policy
from kvdrift.policy import PolicyError, from_dict

EXACT = from_dict({"key": None}, name="exact")


def prompt(batch: int = 2, length: int = 60, padded: bool = True) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :23] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, cache: Any, inputs: dict[str, torch.Tensor] | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"max_new_tokens": 24, "do_sample": False, "cache": cache, **options}
    return model.generate(**(inputs or prompt()), **options, return_dict_in_generate=True, output_logits=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_p": 0.9}, {"num_beams": 3}], ids=str)
def test_the_exact_policy_is_the_dynamic_cache_token_for_token_and_bit_for_bit(
    dtype: str, options: dict[str, Any], llama: Any, llama_bf16: Any
) -> None:
    model = llama if dtype == "float32" else llama_bf16
    ours = generate(model, PackedCache(EXACT, model.config), **options)
    theirs = generate(model, DynamicCache(config=model.config), **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True))


def test_a_policy_with_nothing_due_yet_is_bit_equal_to_sdpa(llama: Any) -> None:
    packed = PackedCache(policy(residual_window=128), llama.config)
    ours = generate(llama, packed)
    llama.set_attn_implementation("sdpa")
    try:
        theirs = generate(llama, DynamicCache(config=llama.config))
    finally:
        llama.set_attn_implementation("kvdrift")
    assert not any(layer.packed for layer in packed.packed_layers)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True))


OPTIONS = pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3}], ids=str)


@pytest.mark.parametrize("prefill", ["exact", "packed"])
@OPTIONS
def test_held_blocks_generate_what_the_exact_cache_does(
    backend: str, prefill: str, options: dict[str, Any], llama: Any
) -> None:
    """Blocks that stay exact, read by the packed path: greedy, sampled and beam search, with padded rows."""
    rows = 2 * options.get("num_beams", 1)
    nowhere = {layer: [range(0)] * rows for layer in range(2)}
    cache = PackedCache(policy(prefill=prefill), llama.config, pack_ranges=nowhere)
    ours = generate(llama, cache, **options)
    theirs = generate(llama, DynamicCache(config=llama.config), **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert all((a - b).abs().max() < 1e-3 for a, b in zip(ours.logits, theirs.logits, strict=True))
    assert cache.packed_layers[0].segments[1]
    assert cache.packed_layers[0].pool.used == 0


@OPTIONS
def test_8_bit_codes_generate_close_to_the_exact_cache(backend: str, options: dict[str, Any], llama: Any) -> None:
    cache = PackedCache(policy(key={"bits": 8}, value={"bits": 8}), llama.config)
    ours = generate(llama, cache, **options)
    theirs = generate(llama, DynamicCache(config=llama.config), **options)
    assert torch.equal(ours.sequences[:, 60:66], theirs.sequences[:, 60:66])
    assert cache.packed_layers[0].pool.used > 0
    assert cache.escalated_blocks == 0
    assert cache.ledger().format_bytes == cache.storage_bytes()


def test_the_older_argument_name_works(llama: Any) -> None:
    cache = PackedCache(policy(), llama.config)
    with pytest.warns(FutureWarning, match="past_key_values"):
        out = llama.generate(**prompt(), max_new_tokens=12, do_sample=False, past_key_values=cache)
    assert cache.packed_layers[0].packed
    assert torch.equal(out, generate(llama, PackedCache(policy(), llama.config), max_new_tokens=12).sequences)


def test_a_second_turn_goes_on_from_the_first_and_a_reset_starts_over(llama: Any) -> None:
    cache = PackedCache(policy(), llama.config)
    first = generate(llama, cache, prompt(padded=False)).sequences
    longer = torch.cat([first, prompt(length=30, padded=False)["input_ids"]], dim=1)
    second = generate(llama, cache, {"input_ids": longer, "attention_mask": torch.ones_like(longer)}).sequences
    assert torch.equal(second[:, : longer.shape[1]], longer)
    assert cache.get_seq_length() == second.shape[1] - 1
    cache.reset()
    assert torch.equal(generate(llama, cache, prompt(padded=False)).sequences, first)


def test_case_7_asking_again_after_a_rollback_gives_the_same_logits(llama: Any) -> None:
    """Case 7: ask, roll back 5 tokens, ask again: 65 states, not 70, and the storage as before."""
    cache, ids = PackedCache(policy(), llama.config), prompt(1, 70, padded=False)["input_ids"]
    with torch.inference_mode():
        llama(ids[:, :60], cache=cache)
        held = cache.ledger()
        first = llama(ids[:, 60:65], cache=cache).logits
        cache.crop(-5)
        assert cache.get_seq_length() == 60
        assert cache.ledger().codes == held.codes
        again = llama(ids[:, 60:65], cache=cache).logits
    assert torch.equal(first, again)
    assert cache.get_seq_length() == 65


def test_assisted_generation_rolls_back_and_agrees_with_greedy(llama: Any) -> None:
    made, inputs = policy(residual_window=16), prompt(1, padded=False)
    alone = generate(llama, PackedCache(made, llama.config), inputs)
    options = {"prompt_lookup_num_tokens": 4}
    helped = generate(llama, PackedCache(made, llama.config), inputs, **options)
    assert torch.equal(alone.sequences, helped.sequences)


def test_peak_is_one_dense_layer_because_each_is_sealed_before_the_next(llama: Any) -> None:
    """Case 8: when layer 1's attention runs, layer 0 holds no dense tensor any more."""
    cache, dense = PackedCache(policy(), llama.config), []

    def look(*_: Any) -> None:
        dense.append([tuple(len(layer.dense) for layer in cache.packed_layers), cache.packed_layers[0].packed])

    hook = llama.model.layers[1].register_forward_pre_hook(look)
    with torch.inference_mode():
        llama(prompt(1, 90, padded=False)["input_ids"], cache=cache)
    hook.remove()
    assert dense == [[(0, 0), True]]


# -- models -----------------------------------------------------------------------------------------------------------


def test_without_the_attention_function_the_error_says_how_to_load_the_model() -> None:
    plain = config()
    plain._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match=r"attn_implementation is 'sdpa'; load it with attn_implementation='kvdrift'"):
        PackedCache(policy(), plain)


def test_case_3_a_group_that_does_not_fit_is_refused_when_the_cache_is_made() -> None:
    """Case 3: head_dim 72 and 80, group 64."""
    for head_dim in (72, 80):
        with pytest.raises(PolicyError, match=f"value.group 64 does not divide head_dim {head_dim}; allowed groups: "):
            PackedCache(load_policy("kivi4"), config(head_dim=head_dim))


def test_a_dtype_that_the_config_does_not_say_is_named() -> None:
    cache = PackedCache(policy(), config(dtype="bfloat16"))
    with pytest.raises(ValueError, match=r"computes in torch\.float32 and its config says 16-bit; pass PackedCache"):
        cache.load([torch.zeros(1, 2, 4, 32)], [torch.zeros(1, 2, 4, 32)])
    with pytest.raises(ValueError, match="dtype is 'float64'; allowed: float32, float16, bfloat16"):
        PackedCache(policy(), config(), dtype=torch.float64)


def sliding(window: int = 40) -> Any:
    made = MistralConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=window,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = MistralForCausalLM(made).eval()
    model.set_attn_implementation("kvdrift")
    return model


def test_sliding_window_layers_stay_exact_by_name() -> None:
    model = sliding()
    cache = PackedCache(policy(), model.config)
    assert cache.unpacked == {0: "DynamicSlidingWindowLayer", 1: "DynamicSlidingWindowLayer"}
    ours = generate(model, cache)
    theirs = generate(model, DynamicCache(config=model.config))
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True))
    assert cache.ledger().format_bytes == cache.storage_bytes()


def test_of_mixed_layer_types_only_full_attention_is_packed() -> None:
    made = Gemma3TextConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(made).eval()
    model.set_attn_implementation("kvdrift")
    cache = PackedCache(policy(key={"bits": 8}, value={"bits": 8}), model.config)
    assert cache.unpacked == {0: "DynamicSlidingWindowLayer", 2: "DynamicSlidingWindowLayer"}
    ours = generate(model, cache)
    theirs = generate(model, DynamicCache(config=model.config))
    assert cache.layers[1].packed
    assert (ours.logits[-1] - theirs.logits[-1]).abs().max() < 0.1
    assert cache.ledger().format_bytes == cache.storage_bytes()
    before = cache.layers[1].seen
    with pytest.raises(RuntimeError, match="crop"):
        cache.crop(-4)
    assert cache.layers[1].seen == before


def test_exhaustion_gives_a_sliding_window_layer_its_tokens_back() -> None:
    made = policy(key={"bits": 8}, value={"bits": 8})
    fields = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24, "num_hidden_layers": 2}
    mistral = MistralConfig(**{**sliding().config.to_dict(), **fields})
    model = MistralForCausalLM(mistral).eval()
    model.set_attn_implementation("kvdrift")
    cache, ids = PackedCache(made, model.config, batch=1, max_tokens=64), prompt(1, 97, padded=False)["input_ids"]
    with torch.inference_mode():
        model(ids[:, :60], cache=cache)
        with pytest.raises(PoolExhausted):
            model(ids[:, 60:], cache=cache)
        assert [layer.get_seq_length() for layer in cache.layers] == [60, 60]
        out = model(ids[:, 60:70], cache=cache).logits
        fresh = PackedCache(made, model.config)
        model(ids[:, :60], cache=fresh)
        assert torch.equal(model(ids[:, 60:70], cache=fresh).logits, out)


def test_one_cache_lives_on_one_device() -> None:
    """Where its pages are reserved, for its layers share them; pools that grow are each on its own layer's."""
    cache = PackedCache(policy(), config(layers=2), batch=1, max_tokens=64)
    cache.pages.pool(0, torch.device("cpu"))
    with pytest.raises(ValueError, match="layer 1 is on meta and its pages are on cpu; use one device"):
        cache.pages.pool(1, torch.device("meta"))


def test_a_mask_of_one_row_is_every_sequences(llama: Any) -> None:
    cache, ids = PackedCache(policy(), llama.config), prompt(2, 60, padded=False)["input_ids"]
    mask = torch.ones(60, 60, dtype=torch.bool).tril()[None, None].expand(1, 1, -1, -1).clone()
    mask[..., :7] = False
    with torch.inference_mode():
        llama(ids, attention_mask=mask, cache=cache)
    assert [cache.layers[0].length(s) for s in range(2)] == [53, 53]


def test_a_forward_pass_outside_no_grad_keeps_no_graph(llama: Any) -> None:
    ids = prompt(1, 97, padded=False)["input_ids"]
    caches = [PackedCache(policy(), llama.config) for _ in "ab"]
    for cache, grad in zip(caches, (True, False), strict=True):
        with torch.set_grad_enabled(grad):
            for span in (ids[:, :90], *ids[:, 90:].split(1, dim=1)):
                llama(span, cache=cache)
    tensors = [[t for layer in cache.layers for group in layer.storages().values() for t in group] for cache in caches]
    assert not any(t.requires_grad for t in tensors[0])
    assert all(layer.packed for layer in caches[0].layers)
    exact = [[layer.sequences.exact.both[:, :, :, : layer.exact[0]] for layer in cache.layers] for cache in caches]
    assert all(torch.equal(a, b) for a, b in zip(*exact, strict=True))


@pytest.mark.parametrize("length", [20, 97])
def test_an_arrival_of_other_sequences_is_refused_and_changes_nothing(length: int, llama: Any) -> None:
    ids = prompt(3, 97, padded=False)["input_ids"]
    cache = PackedCache(policy(), llama.config)
    with torch.inference_mode():
        llama(ids[:2, :length], cache=cache)
        for other in (ids[:1, :1], ids[:, :1]):
            with pytest.raises(ValueError, match=f"{len(other)} sequences arrive and the cache holds 2; choose with"):
                llama(other, cache=cache)
        assert [layer.get_seq_length() for layer in cache.layers] == [length] * len(cache.layers)
        fresh = PackedCache(policy(), llama.config)
        llama(ids[:2, :length], cache=fresh)
        assert torch.equal(llama(ids[:2, :9], cache=cache).logits, llama(ids[:2, :9], cache=fresh).logits)


def test_a_copied_cache_goes_on_on_its_own(llama: Any) -> None:
    """Prefix reuse, as Transformers' documentation has it."""
    ids = prompt(1, 160, padded=False)["input_ids"]
    cache = PackedCache(policy(), llama.config)
    with torch.inference_mode():
        llama(ids[:, :97], cache=cache)
        copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
        first = llama(ids[:, 97:], cache=cache).logits
        assert all(torch.equal(llama(ids[:, 97:], cache=other).logits, first) for other in copies)
    assert copies[0].ledger() == cache.ledger()
    assert copies[0].storage_bytes() == cache.storage_bytes() == cache.ledger().format_bytes


def test_what_attention_does_not_know_is_refused() -> None:
    """Attention sinks, soft-capping and biases would be left out of the answer."""
    fed, everything = stream(policy()), tokens(8)
    for name in ("s_aux", "softcap", "position_bias"):
        key, value = fed.cache.update(everything.k, everything.v, 0)
        with pytest.raises(ValueError, match=f"takes {name}, which kvdrift's doesn't know"):
            attention.attention(fed.module, everything.q, key, value, None, **{name: 1.0})
    other = PackedCache(policy(), config())
    with pytest.raises(
        ValueError, match=r"has \(KV heads, head_dim\) of \[\(2, 16\)\] and the model's config says \(2, 32\)"
    ):
        other.update(everything.k[..., :16], everything.v[..., :16], 0)


def test_a_cut_that_is_too_deep_cuts_no_layer() -> None:
    """Layer 0 stays exact, by policy, beside a packed one."""
    made = from_dict({"layers": [{}, {"key": KEY4, "value": VALUE4}], "block": 32})
    cache, everything = PackedCache(made, config(layers=2)), tokens(70)
    for index in range(2):
        Stream(cache, index).feed(everything)
    with pytest.raises(ValueError, match="remove at most 70"):
        cache.crop(-71)
    assert [cache.get_seq_length(index) for index in range(2)] == [70, 70]
