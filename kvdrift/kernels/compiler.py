"""Compile `native/*.cpp` for this machine, once, and load it.

The library lies in `$KVDRIFT_CACHE` (or `~/.cache/kvdrift`) under a name that hashes everything that decides its code:
sources, flags, compiler and CPU. Each process compiles into its own folder and moves the result into place, so that
two that start at once can't see half a file. It ends with its own digest: one that was damaged since is compiled anew.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).with_name("native")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC")
CONTRACTION = {"encode.cpp": "off", "decode.cpp": "off", "attention.cpp": "fast"}
"""Encoding and decoding round every operation, as the definition does; attention may fuse a product with its sum."""
DIGEST_BYTES = 32


class NativeUnavailable(RuntimeError):
    """The native kernels can't be built or loaded here; the message names what is missing."""


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded kernels.

    Raises NativeUnavailable without a C++ compiler, when it refuses the sources, or where the folder can't be used.
    """
    try:
        path = cache_folder() / f"native-{build_id()}.so"
        if not _whole(path):
            _compile(path)
        kernels = ctypes.CDLL(str(path))
    except NativeUnavailable:
        raise
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # RuntimeError: there is no home folder
        folder = os.environ.get("KVDRIFT_CACHE") or "~/.cache/kvdrift"
        raise NativeUnavailable(
            f"can't compile into {folder} or load from there ({error}); "
            "set KVDRIFT_CACHE to a folder that can be written to and may hold libraries"
        ) from error
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    for name, arguments in {
        "seal": (pointer, pointer, pointer, pointer, number, pointer, pointer, count, pointer, number),
        "unseal": (pointer, pointer, pointer, count, number, pointer, pointer, number),
        "checksum": (pointer, count, pointer, count, pointer, number),
        "label": (pointer, count, pointer, count, pointer, number),
        "decode_attention": (pointer,),
    }.items():
        function = getattr(kernels, f"kvdrift_{name}")
        function.argtypes, function.restype = arguments, None
    return kernels


def cache_folder() -> Path:
    """`$KVDRIFT_CACHE`, or `~/.cache/kvdrift`."""
    return Path(os.environ.get("KVDRIFT_CACHE") or Path.home() / ".cache" / "kvdrift")


@functools.cache
def build_id() -> str:
    """16 hex digits over sources, flags, compiler and CPU."""
    content = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.[ch]*")):
        content.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    content.update(repr((FLAGS, extra_flags(), CONTRACTION, _compiler_version(), _cpu())).encode())
    return content.hexdigest()[:16]


def extra_flags() -> tuple[str, ...]:
    """`$KVDRIFT_CXXFLAGS`, split at spaces; `-DKVDRIFT_PORTABLE` builds the path of CPUs without AVX-512,
    `-DKVDRIFT_NO_VNNI` that of the first ones with it."""
    return tuple(os.environ.get("KVDRIFT_CXXFLAGS", "").split())


def _compiler() -> str:
    found = shutil.which("c++")
    if found is None:
        raise NativeUnavailable("no C++ compiler: `c++` is not on PATH (on Debian: apt install g++)")
    return found


def _compiler_version() -> str:
    return subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=True).stdout


def _cpu() -> str:
    """What `-march=native` looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(
        sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))})
    )


def _whole(path: Path) -> bool:
    """Whether it is there, undamaged. To load one that was cut short can end the process."""
    if not path.is_file():
        return False
    content = path.read_bytes()
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def _compile(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="compiling-") as folder:
        objects = [Path(folder) / f"{name}.o" for name in CONTRACTION]
        _run(
            *(
                [_compiler(), *FLAGS, *extra_flags(), f"-ffp-contract={mode}", "-c", str(SOURCES / name), "-o", str(to)]
                for (name, mode), to in zip(CONTRACTION.items(), objects, strict=True)
            )
        )
        linked = Path(folder) / path.name
        _run([_compiler(), *FLAGS, "-shared", *map(str, objects), "-o", str(linked)])
        linked.write_bytes(linked.read_bytes() + hashlib.sha256(linked.read_bytes()).digest())
        os.replace(linked, path)


def _run(*commands: list[str]) -> None:
    """Run the commands side by side."""
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands
    ]
    outputs = [process.communicate()[0] for process in started]
    for command, process, output in zip(commands, started, outputs, strict=True):
        if process.returncode:
            raise NativeUnavailable(f"`{' '.join(command)}` failed:\n{output}")
