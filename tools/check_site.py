"""Check a built site: every link leads to a file and anchor of the site, and nothing is loaded from another host.

    python tools/check_site.py out/site

mkdocs checks the links of pages; this checks the built HTML, with what docstrings, the theme and hooks put there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from posixpath import normpath
from urllib.parse import unquote, urlsplit

EXTERNAL = re.compile(r"(?:[a-z]+:)?//", re.IGNORECASE)
CSS_LOAD = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:[a-z]+:)?//[^"')\s]+)""", re.IGNORECASE)
NO_LOAD = {"alternate", "canonical", "next", "prev"}
"""Values of `<link rel>` that a browser does not load."""
FETCHING = {"mermaid": "the theme fetches mermaid from a content network",
            "source": "the theme fetches the facts of a repository"}
"""Classes and components of elements for which the theme's own script loads something from another host."""


@dataclass
class Document(HTMLParser):
    """What one HTML file offers and needs."""

    anchors: set[str] = field(default_factory=set[str])
    links: list[str] = field(default_factory=list[str])
    loads: list[str] = field(default_factory=list[str])
    fetching: list[str] = field(default_factory=list[str])
    _style: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self._style = tag == "style"
        self.loads += [target for name in ("src", "data", "poster") if (target := given.get(name))]
        self.loads += [part.split()[0] for part in given.get("srcset", "").split(",") if part.split()]
        self.loads += CSS_LOAD.findall(given.get("style", ""))
        if href := given.get("href") or given.get("xlink:href"):
            followed = tag == "a" or (tag == "link" and NO_LOAD & set(given.get("rel", "").split()))
            (self.links if followed else self.loads).append(href)
        components = {*given.get("class", "").split(), given.get("data-md-component", "")}
        self.fetching += [reason for name, reason in FETCHING.items() if name in components]

    def handle_data(self, data: str) -> None:
        if self._style:
            self.loads += CSS_LOAD.findall(data)

    def handle_endtag(self, tag: str) -> None:
        self._style = self._style and tag != "style"


def read(path: Path) -> Document:
    document = Document()
    document.feed(path.read_text())
    return document


def problems(site: Path) -> Iterator[str]:
    """Yield what is wrong with the site, one line each."""
    documents = {path.relative_to(site).as_posix(): read(path) for path in sorted(site.rglob("*.html"))}
    for name, document in documents.items():
        yield from (f"{name}: {reason}" for reason in document.fetching)
        yield from (f"{name}: loads {target}" for target in document.loads if EXTERNAL.match(target))
        for target in {*document.links, *document.loads}:
            if fault := broken(target, name, site, documents):
                yield f"{name}: {fault}"
    for path in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        text = path.read_text()
        loads = CSS_LOAD.findall(text) + re.findall(r"""<(?:image|use|script)[^>]+href=["'](\w+://[^"']+)""", text)
        yield from (f"{path.relative_to(site)}: loads {target}" for target in loads)


def broken(target: str, page: str, site: Path, documents: dict[str, Document]) -> str | None:
    """Return what is wrong with a link of `page`, None where it leads somewhere or to another host."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return None
    path = unquote(parts.path)
    start = "" if path.startswith("/") else f"{page}/../"
    name = normpath(f"{start}{path.lstrip('/')}") if path else page
    if (site / name).is_dir():
        name = normpath(f"{name}/index.html")
    if name.startswith("../") or not (site / name).is_file():
        return f"{target} leads to no file"
    if parts.fragment and name in documents and unquote(parts.fragment) not in documents[name].anchors:
        return f"{target} leads to no anchor"
    return None


def main(site: Path) -> int:
    found = sorted(set(problems(site)))
    for problem in found:
        print(problem, file=sys.stderr)
    pages = sum(1 for _ in site.rglob("*.html"))
    print(f"{site}: {pages} pages, {len(found)} problems")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
