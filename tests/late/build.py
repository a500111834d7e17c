"""Build of the late device and the process groups of tests: C++ files become libraries, once for each content and torch.

`NoCompiler` says why a build is impossible; tests that need the device skip with it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

__all__ = ["NoCompiler", "build"]

_SOURCES = Path(__file__).parent / "native"
_TORCH = Path(torch.__file__).parent
_FLAGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
_INCLUDES = (_TORCH / "include", _TORCH / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"]))
_LIBRARIES = {"liblate.so": ("timeline", "memory", "guard", "twins", "shapes", "operators"), "late_group.so": ("group",),
              "staged_group.so": ("staged",)}
"""Their sources; `late_group.so` links to `liblate.so`, which comes first."""


class NoCompiler(Exception):
    """The late device cannot be built here."""


@cache
def build(*libraries: str) -> Path:
    """Compile what has changed of `libraries` (default: all) and return their folder; CUDA needs `staged_group.so` alone.

    Processes that build at once wait for each other.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NoCompiler("the late device needs a C++ compiler: install g++, or set CXX")
    folder = _folder(compiler)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for library in libraries or _LIBRARIES:
            if not (folder / library).exists():
                _link(compiler, folder / library, [_compiled(compiler, folder, name) for name in _LIBRARIES[library]])
    return folder


def _folder(compiler: str) -> Path:
    """Return the folder of these sources, which checkouts with an equal torch share, wherever that lies."""
    recipe = hashlib.sha256(" ".join([compiler, sys.version, *_FLAGS]).encode())
    for path in sorted(_SOURCES.iterdir()):
        recipe.update(path.read_bytes())
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache_home / "shoal" / "late" / f"{torch.__version__}-{recipe.hexdigest()[:16]}"


def _compiled(compiler: str, folder: Path, name: str) -> Path:
    target = folder / f"{name}.o"
    if not target.exists():
        includes = [f"-isystem{path}" for path in _INCLUDES]
        _run([compiler, *_FLAGS, *includes, "-c", str(_SOURCES / f"{name}.cpp"), "-o", f"{target}.part"])
        Path(f"{target}.part").replace(target)
    return target


def _link(compiler: str, library: Path, objects: Sequence[Path]) -> None:
    folder = _TORCH / "lib"
    _run([compiler, "-shared", *map(str, objects), "-o", f"{library}.part", f"-L{folder}", f"-Wl,-rpath,{folder}", "-lc10",
          "-ltorch_cpu", "-ltorch", "-ltorch_python", *_depends(library)])
    Path(f"{library}.part").replace(library)


def _depends(library: Path) -> list[str]:
    """Return what links the group of the late device to the device, which lies beside it."""
    return [str(library.parent / "liblate.so"), "-Wl,-rpath,$ORIGIN"] if library.name == "late_group.so" else []


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"building the late device failed: {' '.join(command)}\n{done.stderr[-4000:]}")
