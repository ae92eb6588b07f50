"""The files a stage script imports from this repository, directly or not: what its `deps` in dvc.yaml must list.

    python tests/closure.py stages/quantize.py

`kvdrift/quantizers`, `kvdrift/kernels` and `kvdrift/cache` count as one thing each; empty `__init__.py` files don't.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHOLE = ("kvdrift/quantizers", "kvdrift/kernels", "kvdrift/cache")
READS = {"kvdrift/report/page.py": "kvdrift/report/templates"}
"""A folder that a module reads beside its imports."""


def closure(script: str) -> set[str]:
    """Paths relative to the repository, the script's own included."""
    todo, found = [script], set[str]()
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        room = _room(path)
        if room != path:  # a room that counts as one thing imports what any of its files does
            todo += [p.relative_to(ROOT).as_posix() for p in (ROOT / room).rglob("*.py")]
        todo += _imports(ROOT / path)
    return {_room(path) for path in found} | {READS[path] for path in found & READS.keys()}


def _room(path: str) -> str:
    return next((room for room in WHOLE if path.startswith(f"{room}/")), path)


def _imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    files = [Path(*name.split(".")).with_suffix(".py") for name in names if name.startswith("kvdrift.")]
    return [file.as_posix() for file in files if (ROOT / file).is_file()]


if __name__ == "__main__":
    print(*sorted(closure(sys.argv[1])), sep="\n")
