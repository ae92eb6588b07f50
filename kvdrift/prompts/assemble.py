"""From messages to a prefix of an exact token length, with a role for every token.

Pieces are encoded one by one and concatenated as tokens, so lengths are exact and roles follow from the construction.
Filler takes up the slack: whole sentences around every planted text, cut only at the far ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from kvdrift.prompts.prompt import PromptError

TEMPLATE = "template"
FILLER = "filler"
NEEDLE = "needle"


@runtime_checkable
class Tokenizer(Protocol):
    """What the prompts need of a Transformers tokenizer."""

    chat_template: Any
    eos_token_id: Any

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


@dataclass(frozen=True)
class Text:
    """Fixed text and the role of its tokens."""

    text: str
    role: str


@dataclass(frozen=True)
class Gap:
    """Room for filler: `share` of the prompt's free tokens, or up to token `until`, or (neither) all that is left."""

    share: float | None = None
    until: int | None = None

    @property
    def last(self) -> bool:
        """Whether this gap takes what the others leave."""
        return self.share is None and self.until is None


@dataclass(frozen=True)
class Message:
    """One chat message; `role` is the chat's (system, user, assistant, tool)."""

    role: str
    parts: tuple[Text | Gap, ...]


@dataclass(frozen=True)
class Stretch:
    """Tokens with their roles, one each."""

    tokens: tuple[int, ...]
    roles: tuple[str, ...]


def message(role: str, *parts: str | Text | Gap) -> Message:
    """A message; bare strings take the message's own role."""
    return Message(role, tuple(Text(part, role) if isinstance(part, str) else part for part in parts))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of `text`, without special tokens of the tokenizer's own."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def opening(tokenizer: Tokenizer) -> list[int]:
    """The tokens with which every plain text starts: the begin-of-text token, where the model has one."""
    eos = tokenizer.eos_token_id
    return [token for token in tokenizer.encode("", add_special_tokens=True) if token != eos]


def flatten(tokenizer: Tokenizer, messages: Sequence[Message], answering: bool) -> list[Text | Gap]:
    """The chat as one run of pieces, the template's own text included.

    `answering` ends it with the assistant's header. A tokenizer without a chat template writes `role: text` lines; a
    template that knows no system or tool role gets that text inside a user message.
    """
    if not getattr(tokenizer, "chat_template", None):
        pieces: list[Text | Gap] = []
        for each in messages:
            pieces += [Text(f"{each.role}: ", TEMPLATE), *each.parts, Text("\n", TEMPLATE)]
        return [*pieces, Text("assistant: ", TEMPLATE)] if answering else pieces
    try:
        frames = _frames(tokenizer, messages, answering)
    except Exception:  # jinja's own error types differ between templates
        messages = _folded(messages)
        frames = _frames(tokenizer, messages, answering)
    pieces = [Text(frames[0], TEMPLATE)]
    for each, frame in zip(messages, frames[1:], strict=True):
        pieces += [*each.parts, Text(frame, TEMPLATE)]
    return pieces


def _frames(tokenizer: Tokenizer, messages: Sequence[Message], answering: bool) -> list[str]:
    """The template's text before, between and after the messages."""
    marks = [f"\u2042{number}\u2042" for number in range(len(messages))]
    chat = [{"role": each.role, "content": mark} for each, mark in zip(messages, marks, strict=True)]
    rest: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=answering)
    frames = []
    for mark in marks:
        frame, found, rest = rest.partition(mark)
        if not found:
            raise PromptError("the chat template drops a message; give the tokenizer a template that keeps all of them")
        frames.append(frame)
    return [*frames, rest]


def _folded(messages: Sequence[Message]) -> list[Message]:
    """The same text with only alternating user and assistant messages."""
    folded: list[Message] = []
    for each in messages:
        role = "assistant" if each.role == "assistant" else "user"
        if folded and folded[-1].role == role:
            joined = (*folded[-1].parts, Text("\n\n", TEMPLATE), *each.parts)
            folded[-1] = replace(folded[-1], parts=joined)
        else:
            folded.append(Message(role, each.parts))
    return folded


def fixed_lengths(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """How many tokens stand before, between and after the gaps of a chat that ends with the assistant's header."""
    lengths = [0]
    for piece in flatten(tokenizer, messages, answering=True):
        if isinstance(piece, Gap):
            lengths.append(0)
        else:
            lengths[-1] += len(encode(tokenizer, piece.text))
    return lengths


def assemble(
    tokenizer: Tokenizer, messages: Sequence[Message], length: int, filler: Iterator[str], name: str
) -> Stretch:
    """The chat at exactly `length` tokens, ending with the assistant's header.

    `filler` yields sentences for the gaps, as many as are asked for. A gap before a planted text loses its first
    tokens and the last gap its last ones, so the planted text stands between whole sentences. `name` is for errors.
    """
    pieces = flatten(tokenizer, messages, answering=True)
    encoded = [encode(tokenizer, piece.text) if isinstance(piece, Text) else [] for piece in pieces]
    fixed = sum(map(len, encoded))
    if fixed > length:
        raise PromptError(
            f"{name} needs {fixed} tokens before any filler, and its length is {length}; ask for a longer prefix"
        )
    free = left = length - fixed
    tokens: list[int] = []
    roles: list[str] = []
    for piece, own in zip(pieces, encoded, strict=True):
        if isinstance(piece, Gap):
            size = left
            if piece.share is not None:
                size = min(left, round(piece.share * free))
            elif piece.until is not None:
                size = min(left, max(0, piece.until - len(tokens)))
            left -= size
            own, role = _fill(tokenizer, filler, size, keep_end=not piece.last), FILLER
        else:
            role = piece.role
        tokens += own
        roles += [role] * len(own)
    if left:
        raise PromptError(f"{name} leaves {left} of {length} tokens empty; its last gap must take what is left")
    return Stretch(tuple(tokens), tuple(roles))


def _fill(tokenizer: Tokenizer, filler: Iterator[str], size: int, keep_end: bool) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < size:
        tokens += encode(tokenizer, " " + next(filler))
    return tokens[len(tokens) - size :] if keep_end else tokens[:size]
