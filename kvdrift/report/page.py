"""Building blocks of a page, how values read on it, and the templates that turn it into markdown or HTML.

This file knows nothing of what a page says.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

NOT_MEASURED = "not measured"
NEARLY, CLOSEST = 1e-3, 1e-7
"""How far from 1 three digits stop telling a figure from it, and what float32 can't tell either."""
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    name: str
    """What it shows, in words."""
    path: str


@dataclass(frozen=True)
class Folded:
    """A table behind one line: an HTML page unfolds it, a markdown page has the line alone."""

    line: str
    table: Table


Block = str | Table | Picture | Folded


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


def shown(value: Any) -> str:
    """A value as a reader wants it: three digits, thousands parted, None as not measured.

    What is nearly 1 shows two digits of how far it is from it: 0.99996 is no 1.
    """
    if value is None:
        return NOT_MEASURED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if 1 - NEARLY < value < 1 - CLOSEST:
            return f"{value:.{1 - math.floor(math.log10(1 - value))}f}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    return str(value)


def size(count: int | None) -> str:
    """Bytes in MiB."""
    return NOT_MEASURED if count is None else f"{count / 2**20:,.2f} MiB"


def blank(value: Any) -> str:
    """A value in a table where None means that it doesn't apply."""
    return "–" if value is None else shown(value)


def flat(value: Any) -> str:
    """A nested mapping on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')} {flat(item)}" for key, item in sorted(value.items()))
    return shown(value)


def render(template: str, **values: Any) -> str:
    """A template of the templates folder, filled; names that it uses and `values` lacks are errors."""
    return environment().get_template(template).render(**values)


def embedded(picture: Path) -> str:
    """A PNG as a data URI, for a page that travels alone."""
    return f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"


def environment() -> Environment:
    """Templates are strict about names; HTML ones escape."""
    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.tests["number"] = lambda text: re.fullmatch(r"[−-]?[\d.,e+-]+( (ms|MiB))?|–", text) is not None
    found.tests["table"] = lambda block: isinstance(block, Table)
    found.tests["folded"] = lambda block: isinstance(block, Folded)
    found.tests["picture"] = lambda block: isinstance(block, Picture)
    found.filters["prose"] = lambda text: Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))
    found.filters["cell"] = lambda text: " ".join(text.replace("|", "\\|").split())
    return found
