"""C++ sources are compiled on first use for this processor, cached, and loaded by ctypes.

The compiler writes a temporary file, which is then renamed: concurrent builds need no lock. On a machine without a compiler,
or when a build fails, `load` warns once and returns None; the caller falls back to torch.
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

__all__ = ["cache_folder", "load"]

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-shared")
_THREADS = "-fopenmp"
_DIGEST = 32
_TIMEOUT = 120  # seconds that a build may take


@cache
def load(name: str) -> ctypes.CDLL | None:
    """Return the library of `native/NAME.cpp`, built if needed; None if it cannot be built.

    `SHOAL_CACHE` names the folder of built libraries (default: `shoal` in the user's cache folder), `CXX` the compiler;
    `SHOAL_NATIVE=0` switches native code off.
    """
    if os.environ.get("SHOAL_NATIVE") == "0":
        return None
    try:
        return _load(Path(__file__).with_name(f"{name}.cpp"))
    except (OSError, subprocess.SubprocessError) as error:
        detail = error.stderr.strip().splitlines()[-1:] if isinstance(error, subprocess.CalledProcessError) else error
        warn_once(f"native code is not available ({name}.cpp: {detail}); torch computes instead, more slowly. Install a C++ "
                  f"compiler, or name one in CXX; SHOAL_NATIVE=0 silences this")
        return None


def _load(source: Path) -> ctypes.CDLL:
    compiler = next((found for name in (os.environ.get("CXX"), "c++", "g++", "clang++")
                     if name and (found := shutil.which(name))), None)
    if compiler is None:
        raise OSError("no C++ compiler was found")
    library = cache_folder() / f"{source.stem}-{_key(source, compiler)}.so"
    if not _is_intact(library):
        _build(source, library, compiler)
    return ctypes.CDLL(str(library))


def _is_intact(library: Path) -> bool:
    """Whether the file exists and ends in its own checksum: loading a damaged library may crash the process."""
    content = library.read_bytes() if library.is_file() else b""
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _build(source: Path, library: Path, compiler: str) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [compiler, *_FLAGS, _THREADS, str(source), "-o", str(built)]
        try:
            _run(command)
        except subprocess.CalledProcessError:  # without OpenMP the kernels run on one thread
            _run([part for part in command if part != _THREADS])
        with built.open("ab") as file:  # the loader ignores bytes after the last section
            file.write(hashlib.sha256(built.read_bytes()).digest())
        built.replace(library)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT)


def cache_folder() -> Path:
    """Return the folder of built libraries and measurements of this machine; this user can write to it."""
    named = os.environ.get("SHOAL_CACHE")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    folder = Path(home) / "shoal"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    except OSError:  # no home, or a read-only one
        return _private(Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}")


def _private(folder: Path) -> Path:
    """Return `folder`, created with mode 0700 if needed; raises OSError if another user owns it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to another user; name a folder in SHOAL_CACHE")
    return folder


def _key(source: Path, compiler: str) -> str:
    """Return a hash of everything a built library depends on: source, headers, flags, compiler and processor."""
    digest = hashlib.sha256()
    headers = [header.read_text() for header in sorted(source.parent.glob("*.h"))]
    for part in (source.read_text(), *headers, *_FLAGS, _THREADS, _version(compiler), platform.machine(), _processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True, timeout=_TIMEOUT).stdout


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
