"""C++ sources become libraries on first use: compiled once for this processor, kept in a cache, loaded by ctypes.

The file is written aside and renamed, so that any number of processes may build at once and none waits for another. A
machine without a compiler, or a build that fails, costs one warning: whoever asked has a way in torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from shoal.log import warn_once

__all__ = ["load"]

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-shared")
_THREADS = "-fopenmp"
_DIGEST = 32
_PATIENCE = 120  # seconds that a build may take


@cache
def load(name: str) -> ctypes.CDLL | None:
    """Return the library of `native/NAME.cpp`, built if need be; None where that is not possible.

    `SHOAL_CACHE` names the folder of built libraries (default: shoal in the user's cache folder), `CXX` the compiler; with
    `SHOAL_NATIVE=0` there is none.
    """
    if os.environ.get("SHOAL_NATIVE") == "0":
        return None
    try:
        return _load(Path(__file__).with_name(f"{name}.cpp"))
    except (OSError, subprocess.SubprocessError) as error:
        detail = error.stderr.strip().splitlines()[-1:] if isinstance(error, subprocess.CalledProcessError) else error
        warn_once(f"native code is not available ({name}.cpp: {detail}); torch does its work, more slowly. Install a C++ "
                  f"compiler, or name one in CXX; SHOAL_NATIVE=0 silences this")
        return None


def _load(source: Path) -> ctypes.CDLL:
    compiler = next((found for name in (os.environ.get("CXX"), "c++", "g++", "clang++")
                     if name and (found := shutil.which(name))), None)
    if compiler is None:
        raise OSError("no C++ compiler was found")
    library = _cache() / f"{source.stem}-{_key(source, compiler)}.so"
    if not _is_whole(library):
        _build(source, library, compiler)
    return ctypes.CDLL(str(library))


def _is_whole(library: Path) -> bool:
    """Whether the file is there and ends in its own checksum: to load a damaged one may kill the process."""
    content = library.read_bytes() if library.is_file() else b""
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _build(source: Path, library: Path, compiler: str) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [compiler, *_FLAGS, _THREADS, str(source), "-o", str(made)]
        try:
            _run(command)
        except subprocess.CalledProcessError:  # a compiler without OpenMP: one thread then
            _run([part for part in command if part != _THREADS])
        with made.open("ab") as file:  # the loader does not mind what follows the last section
            file.write(hashlib.sha256(made.read_bytes()).digest())
        made.replace(library)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PATIENCE)


def _cache() -> Path:
    """Return the folder of built libraries, one that this user can write."""
    named = os.environ.get("SHOAL_CACHE")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    folder = Path(home) / "shoal"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    except OSError:  # no home, or a read-only one
        return _own(Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}")


def _own(folder: Path) -> Path:
    """Return `folder`, made for this user alone; raises OSError when it is somebody else's."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to another user; name a folder in SHOAL_CACHE")
    return folder


def _key(source: Path, compiler: str) -> str:
    """Return what a built library depends on: source, what sources share, flags, compiler and processor."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True, timeout=_PATIENCE).stdout
    found = hashlib.sha256()
    shared = [header.read_text() for header in sorted(source.parent.glob("*.h"))]
    for part in (source.read_text(), *shared, *_FLAGS, _THREADS, version, platform.machine(), _processor()):
        found.update(part.encode() + b"\0")
    return found.hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
