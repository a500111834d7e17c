"""Build of the late device: each C++ file is compiled once per content, then linked into two libraries.

`NoCompiler` says why a build is impossible; tests that need the device skip with it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
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
_LIBRARIES = {"liblate.so": ("timeline", "memory", "guard", "twins", "operators"), "late_group.so": ("group",)}


class NoCompiler(Exception):
    """The late device cannot be built here."""


@cache
def build() -> Path:
    """Compile what has changed and return the folder of the libraries. Processes that build at once wait for each other."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NoCompiler("the late device needs a C++ compiler: install g++, or set CXX")
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shoal" / "late" / torch.__version__
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        headers = b"".join(path.read_bytes() for path in sorted(_SOURCES.glob("*.h")))
        common = b"".join([headers, " ".join([compiler, *_FLAGS, *map(str, _INCLUDES)]).encode()])
        for library, names in _LIBRARIES.items():
            _link(compiler, folder / library, _compiled(compiler, folder, names, common))
    return folder


def _compiled(compiler: str, folder: Path, names: Sequence[str], common: bytes) -> list[Path]:
    objects: list[Path] = []
    for name in names:
        source = _SOURCES / f"{name}.cpp"
        target = folder / f"{name}-{hashlib.sha256(common + source.read_bytes()).hexdigest()[:16]}.o"
        if not target.exists():
            includes = [f"-isystem{path}" for path in _INCLUDES]
            _run([compiler, *_FLAGS, *includes, "-c", str(source), "-o", f"{target}.part"])
            for old in folder.glob(f"{name}-*.o"):
                old.unlink()
            Path(f"{target}.part").replace(target)
        objects.append(target)
    return objects


def _link(compiler: str, library: Path, objects: Sequence[Path]) -> None:
    recipe = library.with_suffix(".recipe")
    wanted = "\n".join(path.name for path in objects)
    if library.exists() and recipe.exists() and recipe.read_text() == wanted:
        return
    folder = _TORCH / "lib"
    _run([compiler, "-shared", *map(str, objects), "-o", f"{library}.part", f"-L{folder}", f"-Wl,-rpath,{folder}", "-lc10",
          "-ltorch_cpu", "-ltorch", "-ltorch_python", *_depends(library)])
    Path(f"{library}.part").replace(library)
    recipe.write_text(wanted)


def _depends(library: Path) -> list[str]:
    """Return what links the second library to the first, which lies beside it."""
    first = next(iter(_LIBRARIES))
    return [] if library.name == first else [str(library.parent / first), "-Wl,-rpath,$ORIGIN"]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"building the late device failed: {' '.join(command)}\n{done.stderr[-4000:]}")
