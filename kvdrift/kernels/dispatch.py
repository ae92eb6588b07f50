"""Choose the kernels for a device: `cuda`, `native`, or the torch `definition`, all with the same five functions."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import warnings
from pathlib import Path
from types import ModuleType

import torch

BACKENDS = ("definition", "native", "cuda")
VARIABLE = "KVDRIFT_BACKEND"


class BackendError(ValueError):
    """`KVDRIFT_BACKEND` names no backend."""


def backend(device: torch.device) -> ModuleType:
    """The module whose `seal`, `label`, `unseal`, `checksum` and `decode_attention` run on `device`.

    `KVDRIFT_BACKEND` overrides the choice. What can't run here (no compiler, no GPU) is replaced by the definition,
    with one warning that names what is missing. Raises BackendError on an unknown name.
    """
    return _module(name(device))


def name(device: torch.device) -> str:
    """The backend that runs on `device`: "definition", "native" or "cuda"."""
    return _resolve(device.type, os.environ.get(VARIABLE))


def build_id(device: torch.device) -> str:
    """12 hex digits over what decides the kernels' code: sources, flags and compiler; block headers carry it."""
    return _build_id(name(device))


@functools.cache
def _module(chosen: str) -> ModuleType:
    return importlib.import_module(f"kvdrift.kernels.{chosen}")


@functools.cache
def _resolve(device_type: str, wanted: str | None) -> str:
    if wanted and wanted not in BACKENDS:
        raise BackendError(f"{VARIABLE} is {wanted!r}; allowed: {', '.join(BACKENDS)} (or unset, to choose by device)")
    chosen = wanted or {"cpu": "native", "cuda": "cuda"}.get(device_type, "definition")
    missing = _missing(chosen, device_type)
    if missing is None:
        return chosen
    warnings.warn(
        f"the {chosen} kernels can't run: {missing}; using the slow torch definition instead",
        RuntimeWarning,
        stacklevel=4,
    )
    return "definition"


def _missing(chosen: str, device_type: str) -> str | None:
    """What keeps a backend from running on this kind of device, or None."""
    home = {"native": "cpu", "cuda": "cuda"}.get(chosen, device_type)
    if home == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if home != device_type:
        return f"it needs tensors on {home}, not on {device_type}"
    if chosen == "native":
        from kvdrift.kernels import compiler

        try:
            compiler.library()
        except compiler.NativeUnavailable as error:
            return str(error)
    if chosen == "cuda":
        try:
            importlib.import_module("cupy")
        except ImportError as error:
            return f"CuPy doesn't import ({error})"
    return None


@functools.cache
def _build_id(chosen: str) -> str:
    if chosen == "native":
        from kvdrift.kernels import compiler

        return compiler.build_id()[:12]
    folder = Path(__file__).parent
    sources = [folder / f"{chosen}.py", *(folder / chosen).glob("*"), *(folder.parent / "quantizers").glob("*.py")]
    content = hashlib.sha256(f"{chosen} torch {torch.__version__} cuda {torch.version.cuda}".encode())
    for source in sorted(sources):
        if source.is_file():
            content.update(source.name.encode() + b"\0" + source.read_bytes())
    return content.hexdigest()[:12]
