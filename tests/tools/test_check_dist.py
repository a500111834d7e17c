"""The check of `make dist` names each file that is missing or superfluous, and metadata that is not the project's."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from check_dist import ROOT, check_metadata, check_sdist, check_wheel, tracked

METADATA = """Metadata-Version: 2.4
Name: shoal
Version: 1.0
Summary: A summary.
License-Expression: Apache-2.0
Requires-Python: >=3.11
Requires-Dist: torch
Description-Content-Type: text/markdown

"""

in_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the files of a package are those that git tracks here")


@pytest.fixture
def metadata() -> str:
    return METADATA + (ROOT / "README.md").read_text()


def wheel(folder: Path, names: Iterable[str], metadata: str) -> Path:
    path = folder / "shoal-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("shoal-1.0.dist-info/METADATA", metadata)
        for name in names:
            archive.writestr(f"shoal/{name}", "")
    return path


def sdist(folder: Path, names: Iterable[str], metadata: str) -> Path:
    path = folder / "shoal-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in (*names, "PKG-INFO"):
            content = metadata.encode() if name == "PKG-INFO" else b""
            member = tarfile.TarInfo(f"shoal-1.0/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@in_git
def test_a_wheel_holds_the_files_of_the_package_and_no_others(tmp_path: Path, metadata: str) -> None:
    files = tracked("src/shoal")
    assert {"py.typed", "native/step.cpp"} <= files
    assert check_wheel(wheel(tmp_path, files, metadata)) == []
    assert check_wheel(wheel(tmp_path, files - {"py.typed", "native/step.cpp"} | {"__pycache__/log.pyc"}, metadata)) == [
        "shoal/native/step.cpp is missing", "shoal/py.typed is missing", "shoal/__pycache__/log.pyc does not belong there"]


@in_git
def test_an_sdist_holds_what_git_tracks_but_for_ci(tmp_path: Path, metadata: str) -> None:
    files = tracked()
    assert check_sdist(sdist(tmp_path, files - {".ci/run"}, metadata)) == []
    assert check_sdist(sdist(tmp_path, files - {".ci/run", "Makefile"} | {"out/log"}, metadata)) == [
        "Makefile is missing", "out/log does not belong there"]


def test_metadata_that_is_not_the_projects_is_told(metadata: str) -> None:
    assert check_metadata(metadata.encode()) == []
    changed = metadata.replace("Summary: A summary.\n", "").replace("text/markdown", "text/plain") + "more"
    assert check_metadata(changed.encode()) == [
        "metadata: no summary", "metadata: description is text/plain, not text/markdown",
        "metadata: the description is not README.md"]


def test_an_invalid_field_of_the_metadata_raises(metadata: str) -> None:
    with pytest.raises(ExceptionGroup, match="invalid"):
        check_metadata(metadata.replace(">=3.11", "three").encode())
