"""Hooks of mkdocs: the site mirrors the repository, so that a relative link means the same on both.

README.md is the home page, and each other page keeps its path: docs/zero.md becomes docs/zero.html. A file that a page
links to, such as an image, is copied to the same place; nothing else of the repository is published. A page api/MODULE.md
in the navigation is generated from the docstrings of the names in the module's `__all__`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import cast

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/*.md")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
RUN_MARK = re.compile(r"^```(\w+) run$", re.MULTILINE)
"""How pages mark the code blocks that a test runs; the site shows the language only."""


def pages() -> list[str]:
    """Return the Markdown files of the repository that are pages, README.md of each folder first."""
    found = {path.relative_to(ROOT) for pattern in PAGES for path in ROOT.glob(pattern)}
    return [path.as_posix() for path in sorted(found, key=lambda path: (path.parent, path.name != "README.md", path.name))]


def linked_files(page: str) -> Iterator[str]:
    """Yield the files of the repository, other than pages, that `page` links to."""
    for target in LINK.findall((ROOT / page).read_text()):
        path = normpath(PurePosixPath(page).parent / target)
        if "://" not in target and not target.endswith(".md") and (ROOT / path).is_file():
            yield path


@cache
def package() -> griffe.Module:
    """Return the package as its sources declare it; nothing is imported."""
    return cast(griffe.Module, griffe.load("shoal", search_paths=[ROOT / "src"], resolve_aliases=True))


def exports(module: griffe.Object) -> list[str]:
    """Return the public names of a module: `__all__`, or its own classes and functions."""
    if module.exports is not None:
        return [str(name) for name in module.exports]
    own = {name: member for name, member in module.members.items() if not member.is_alias}
    return [name for name, member in own.items() if member.is_class or member.is_function]


def reference_page(path: str, reference: Collection[str]) -> str:
    """Return the page of the module `path`: its docstring, then each public name.

    A module of `reference`, which has a page of its own, is linked, and a name of another library is named.
    """
    module = package()[path.removeprefix("shoal.")] if path != "shoal" else package()
    blocks = [f"# {path}", f"::: {path}\n    options:\n      members: false\n      show_root_heading: false"]
    for name in exports(module):
        member = module.members[name]
        if f"{path}.{name}" in reference:
            blocks.append(f"## {name}\n\nSee [{path}.{name}]({path}.{name}.md).")
        elif isinstance(member, griffe.Alias) and not member.target_path.startswith("shoal."):
            blocks.append(f"## {name}\n\nThis is `{member.target_path}`.")
        elif not name.startswith("_"):
            blocks.append(f"::: {path}.{name}")
    return "\n\n".join(blocks) + "\n"


def entries(nav: object) -> Iterator[str]:
    """Yield the paths of a navigation, however deep."""
    match nav:
        case str():
            yield nav
        case dict():
            yield from (path for value in nav.values() for path in entries(value))
        case list():
            yield from (path for value in nav for path in entries(value))
        case _:
            raise ValueError(f"nav of mkdocs.yml: {nav!r} is no path, list or title with its paths")


def expanded(nav: object) -> object:
    """Return a navigation in which each folder is replaced by its pages."""
    match nav:
        case str() if nav.endswith("/"):
            return [page for page in pages() if page.startswith(nav)]
        case dict():
            return {title: expanded(value) for title, value in nav.items()}
        case list():
            return [expanded(value) for value in nav]
        case _:
            return nav


def on_config(config: MkDocsConfig) -> None:
    config.nav = cast(list[object], expanded(config.nav))
    config.watch += [str(ROOT / name) for name in ("README.md", "examples", "benchmarks", "src")]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Publish the pages of the repository and what they link to, instead of the folder docs/, and the API reference."""
    published = [file for file in files if file.src_dir != config.docs_dir]  # the theme's
    for path in [*pages(), *sorted({file for page in pages() for file in linked_files(page)})]:
        published.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    reference = [path[len("api/"):-len(".md")] for path in entries(config.nav) if path.startswith("api/")]
    for module in reference:
        content = reference_page(module, reference)
        published.append(File.generated(config, f"api/{module}.md", content=content))
    return Files(published)


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    return RUN_MARK.sub(r"```\1", markdown)
