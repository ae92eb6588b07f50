"""The tiny random model that the tests measure: it answers nothing, and takes no download.

torch and transformers are imported inside the function, so that a look at its shape stays cheap.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
"""The smallest Llama with grouped queries; wide initial weights, so that attention is not flat."""

TINY_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TINY_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny(seed: int, dtype: str, out: Path) -> None:
    """Write a random Llama and a tokenizer whose tokens are the 256 bytes and three specials to the folder `out`."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    end, start, stop = TINY_SPECIALS
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*TINY_SPECIALS, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in TINY_SPECIALS])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=start, eos_token=stop, pad_token=end, chat_template=TINY_CHAT
    ).save_pretrained(out)

    ids = {"pad_token_id": vocabulary[end], "bos_token_id": vocabulary[start], "eos_token_id": vocabulary[stop]}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**TINY, **ids)).to(getattr(torch, dtype))
    model.save_pretrained(out)
