"""Check that the wheel and the sdist are complete, install without a compiler, and train.

    python tools/check_dist.py dist torch==2.13.0

One clean virtual environment serves both: the wheel is installed with its dependencies, tried and uninstalled, and the
sdist takes its place. Training runs outside the repository, with an empty home folder and with no compiler on PATH.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parents[1]
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++")
FALLBACK = re.compile(r"native code is not available \(([\w.]+): no C\+\+ compiler was found\)")
LEFT_OUT = (".ci/", ".gitignore")
"""Tracked files that an sdist need not hold."""


def tracked(folder: str = ".") -> set[str]:
    """Return the files below `folder` that git tracks, by their path from there."""
    command = ["git", "-C", str(ROOT / folder), "ls-files"]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines())


def difference(found: set[str], expected: set[str]) -> list[str]:
    return [f"{name} is missing" for name in sorted(expected - found)] + [
        f"{name} does not belong there" for name in sorted(found - expected)]


def check_wheel(path: Path) -> list[str]:
    """Return the problems of the wheel: its files are those of the package, C++ sources and py.typed among them."""
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        problems = check_metadata(archive.read(metadata))
    packaged = {name for name in names if not name.startswith(metadata.split("/")[0])}
    return problems + difference(packaged, {f"shoal/{name}" for name in tracked("src/shoal")})


def check_sdist(path: Path) -> list[str]:
    """Return the problems of the sdist: its files are the tracked ones, so that tests and docs run from it."""
    with tarfile.open(path) as archive:
        top = path.name.removesuffix(".tar.gz") + "/"
        names = {member.name.removeprefix(top) for member in archive.getmembers() if member.isfile()}
        file = archive.extractfile(f"{top}PKG-INFO")
        assert file is not None
        problems = check_metadata(file.read())
    expected = {name for name in tracked() if not name.startswith(LEFT_OUT)} | {"PKG-INFO"}
    return problems + difference(names - set(LEFT_OUT), expected)


def check_metadata(text: bytes) -> list[str]:
    """Return the problems of the metadata. Raises where a field is not valid."""
    metadata = Metadata.from_email(text, validate=True)
    problems = [f"metadata: no {field}" for field in ("summary", "license_expression", "requires_python", "requires_dist")
                if not getattr(metadata, field)]
    if metadata.description_content_type != "text/markdown":
        problems.append(f"metadata: description is {metadata.description_content_type}, not text/markdown")
    if (metadata.description or "").strip() != (ROOT / "README.md").read_text().strip():
        problems.append("metadata: the description is not README.md")
    return problems


def train(venv: Path, folder: Path, ranks: int) -> list[str]:
    """Train examples/minimal.py outside the repository; return what is wrong with what it printed."""
    folder.mkdir()
    shutil.copy(ROOT / "examples/minimal.py", folder)
    home, cache = folder / "home", folder / "cache"
    home.mkdir()
    cache.mkdir()
    environment = {"PATH": str(venv / "bin"), "HOME": str(home), "SHOAL_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    assert not any(shutil.which(name, path=environment["PATH"]) for name in COMPILERS)
    start = ["python"] if ranks == 1 else ["shoal", "run", "--ranks", str(ranks)]
    command = [str(venv / "bin" / start[0]), *start[1:], "minimal.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    output = done.stdout + done.stderr
    if done.returncode:
        return [f"{ranks} ranks: exit code {done.returncode}\n{output}"]
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", output)]
    told = FALLBACK.findall(output)
    problems = []
    if not (len(losses) == 3 and losses[-1] < losses[0] / 2):
        problems.append(f"{ranks} ranks: losses {losses}, of which the last is not half the first")
    if not told or len(told) != len(set(told)) * ranks:
        problems.append(f"{ranks} ranks: expected one message per rank for each library that fell back to torch, got {told}")
    if any(cache.iterdir()):
        problems.append(f"{ranks} ranks: something was built although no compiler was on PATH")
    print(f"    {ranks} rank{'s' * (ranks > 1)}: losses {losses}")
    return problems


def main(dist: Path, torch: str) -> int:
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    problems = [*check_wheel(wheel), *check_sdist(sdist)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        venv = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        pip = [str(venv / "bin" / "pip"), "--quiet", "--disable-pip-version-check"]
        constrained = os.environ | {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
        for package in (wheel, sdist):
            print(f"{package.name}: install and train")
            subprocess.run([*pip, "install", torch, str(package)], check=True, env=constrained)
            for ranks in (1, 2):
                problems += [f"{package.name}: {problem}"
                             for problem in train(venv, folder / f"{package.suffix[1:]}-{ranks}", ranks)]
            subprocess.run([*pip, "uninstall", "--yes", "shoal"], check=True)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
