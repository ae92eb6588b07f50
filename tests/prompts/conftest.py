"""A byte tokenizer (one token a byte), with and without a chat template, and the corpora of `conf/corpus`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvdrift.prompts.build import build
from kvdrift.prompts.prompt import Prompt
from kvdrift.prompts.spec import CohortSpec, CorpusSpec

ROOT = Path(__file__).parents[2]
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRICT = CHAT.replace("%}", "%}{% if m['role'] in ['system', 'tool'] %}{{ raise_exception('no') }}{% endif %}", 1)


def _byte_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)} | {"<eos>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False)
    fast.chat_template = chat_template
    return fast


def _load_spec(name: str) -> CorpusSpec:
    path = ROOT / "conf" / "corpus" / f"{name}.yaml"
    return CorpusSpec.from_dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def _longer(cohorts: Mapping[str, CohortSpec]) -> dict[str, CohortSpec]:
    return {
        name: replace(each, prompts={4 * length: count for length, count in each.prompts.items()})
        for name, each in cohorts.items()
    }


@pytest.fixture(scope="session")
def load_spec() -> Callable[[str], CorpusSpec]:
    """The named specification under `conf/corpus`."""
    return _load_spec


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The folder of source texts."""
    return ROOT / "data" / "corpus"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """256 byte tokens and an end of turn, without a chat template."""
    return _byte_tokenizer()


@pytest.fixture(params=[CHAT, STRICT], ids=["system and tool", "user and assistant only"])
def chat_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """The same with a chat template, one of which refuses system and tool messages."""
    return _byte_tokenizer(request.param)


@pytest.fixture(scope="session")
def smoke(tokenizer: PreTrainedTokenizerFast, corpus: Path) -> list[Prompt]:
    """The smoke corpus."""
    return build(tokenizer, _load_spec("smoke"), corpus, 512, seed=0)


@pytest.fixture(scope="session")
def laptop(corpus: Path) -> list[Prompt]:
    """The laptop corpus at four times its length, since a byte is about a quarter of a real token."""
    spec = _load_spec("laptop")
    grid = replace(
        spec.needle_grid,
        depths={key if key == "max" else 4 * int(key): depths for key, depths in spec.needle_grid.depths.items()},
    )
    spec = replace(spec, cohorts=_longer(spec.cohorts), calibration=_longer(spec.calibration), needle_grid=grid)
    return build(_byte_tokenizer(CHAT), spec, corpus, 4 * 8192, seed=0)
