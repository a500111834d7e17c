"""The programs of the README and the docs run, their pictures are drawn, and their references exist.

A page is one script: its blocks marked ```python run and ```console run are executed in order, in one process that is a
rank of its own, in an empty folder that holds the repository's examples.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import shoal
from shoal.launch import cli
from shoal.testing import run_ranks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = [*sorted(ROOT.glob("*.md")),
         *sorted(page for folder in ("docs", "examples", "benchmarks") for page in (ROOT / folder).rglob("*.md"))]
MEASURED = ("communication.svg", "convergence.svg", "rscan.svg", "slow_network.svg")
"""Pictures of what was measured, which a benchmark draws."""
BLOCK = re.compile(r"^```(\w+) run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
NAV = re.compile(r"^ *- (?:[\w ]+: )?((?:[\w-]+/)*[\w.-]+\.md|(?:\w+/)+)$", re.MULTILINE)
SOURCE = re.compile(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+|(?:\w+/)*\w+\.(?:py|json|md))`")
WRITTEN = {"index.json", "zero_to_fp32.py"}
"""Files of checkpoint folders, which no repository holds."""


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def run_page(text: str, folder: str) -> None:
    """Execute the blocks of a page on this rank."""
    os.chdir(folder)
    script = sys.modules["__main__"] = ModuleType("__main__")  # which torch.compile looks names up in
    names = vars(script)
    for kind, block in BLOCK.findall(text):
        match kind:
            case "python":
                exec(compile(block, "<page>", "exec"), names)
            case "console":
                for line in filter(None, block.splitlines()):
                    run_line(line)
            case _:
                raise AssertionError(f"```{kind} run: only python and console blocks are run")


def run_line(line: str) -> None:
    """Execute one command of a page."""
    command, *words = shlex.split(line, comments=True)
    match command:
        case "shoal":
            with contextlib.redirect_stdout(io.StringIO()):
                assert cli.main(words) == 0, line
        case ".venv/bin/pytest":
            done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        case _:
            raise AssertionError(f"{line}: only shoal and .venv/bin/pytest are run")


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=page_id)
def test_what_a_page_shows_runs(page: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run_ranks(1, run_page, page.read_text(), str(tmp_path))


def run_script(path: str, folder: str) -> str:
    os.chdir(folder)
    sys.argv = [path]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def test_the_loop_of_the_readme_learns_on_two_ranks(tmp_path: Path) -> None:
    spoke, silent = run_ranks(2, run_script, str(ROOT / "examples/minimal.py"), str(tmp_path))
    losses = [float(line.split()[-1]) for line in spoke.splitlines()]
    assert len(losses) == 3 and losses[-1] < losses[0] / 2
    assert silent == ""
    assert (tmp_path / "out/minimal/latest").is_file()


def test_the_readme_shows_the_minimal_example_as_it_is() -> None:
    _, _, loop = (ROOT / "examples/minimal.py").read_text().partition('"""\n\n')
    assert loop in (ROOT / "README.md").read_text()


def test_every_command_of_make_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for page in PAGES for word in re.findall(r"(?:^ *|`)make ([a-z0-9-]+)", page.read_text(), re.MULTILINE)}
    assert named <= targets and {"train", "test", "check"} <= named


def test_ci_runs_every_command_of_contributing() -> None:
    continuous = re.sub(r"\s+", " ", (ROOT / ".ci/run").read_text().replace("\\\n", " "))
    commands = re.findall(r"^    (.+?) *(?:#.*)?$", CONTRIBUTING.read_text(), re.MULTILINE)
    assert commands
    assert [command for command in commands if command not in continuous] == []


def test_contributing_has_a_row_for_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "src/shoal").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/` \|", CONTRIBUTING.read_text(), re.MULTILINE)) == packages


def links(page: Path) -> Iterator[str]:
    """Yield what a page points to and the repository does not hold."""
    text = page.read_text()
    for target in LINK.findall(text):
        if "://" not in target and not (page.parent / target).exists():
            yield target
    source = ROOT / "src" / "shoal"
    homes = (ROOT, source, page.parent, *(package for package in source.iterdir() if package.is_dir()))
    for name in SOURCE.findall(text):  # within a section on one package, files have their names in it
        if not any((home / name).exists() for home in homes) and not name.startswith("out/") and name not in WRITTEN:
            yield name


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_what_a_page_points_to_is_there(page: Path) -> None:
    assert list(links(page)) == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        found = {(page.parent / target).resolve() for target in LINK.findall(page.read_text()) if target.endswith(".md")}
        waiting += [other for other in found - reached if other.is_file()]
    assert {page.resolve() for page in PAGES} <= reached


def test_the_site_has_every_page_and_a_reference_of_public_names() -> None:
    nav = NAV.findall((ROOT / "mkdocs.yml").read_text())
    modules = [import_module(path[len("api/"):-len(".md")]) for path in nav if path.startswith("api/")]
    assert modules[0] is shoal
    for module in modules:
        assert [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)] == [], module.__name__
    shown = {path for path in nav if not path.startswith("api/")}
    assert [path for path in shown if not (ROOT / path).exists()] == []
    folders = tuple(path for path in shown if path.endswith("/"))
    assert [page_id(page) for page in PAGES if page_id(page) not in shown and not page_id(page).startswith(folders)] == []


def test_the_pictures_are_what_the_script_draws() -> None:
    drawn = runpy.run_path(str(DOCS / "draw.py"))["pictures"]()
    there = {path.name: path.read_text() for path in (DOCS / "images").glob("*.svg") if path.name not in MEASURED}
    assert there == drawn
