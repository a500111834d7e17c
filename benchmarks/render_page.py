"""Render what was measured into docs/measurements.md, between its markers, and mark what is older than the code it measures.

    python benchmarks/render_page.py [FOLDER]

Every file of out/benchmarks (or FOLDER) named after a benchmark fills the part of the page between
`<!-- NAME -->` and `<!-- /NAME -->`; parts without a file stay as they are. A part of an earlier commit than the last change
of the code of its section (sections.py) says so in its last line. `record.py` runs the commands too.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from machine import ROOT, changes_since
from results import FOLDER, Sheet, targets_sheet
from sections import SECTIONS

PAGE = ROOT / "docs" / "measurements.md"
OLDER = re.compile(r"\n\*Older than the code:.*\*\n")
COMMIT = re.compile(r"commit ([0-9a-f]{7,40})")


def main() -> None:
    fill_page(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)


def fill_page(folder: Path, names: Collection[str] | None = None) -> None:
    """Render the parts called `names`, all by default, from the files in `folder`; mark all parts that are older."""
    text = PAGE.read_text()
    for name in re.findall(r"<!-- ([\w-]+) -->", text):
        file = folder / f"{name}.json"
        if (names is None or name in names) and file.exists():
            text = fill(text, name, render(json.loads(file.read_text())))
            sys.stdout.write(f"{name}: from {file}\n")
        text = fill(text, name, marked(part(text, name), name))
    PAGE.write_text(text)


def part(text: str, name: str) -> str:
    """Return what stands between the markers of `name`."""
    found = re.search(f"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", text, re.DOTALL)
    return found[1] if found else ""


def marked(part: str, name: str) -> str:
    """Return a part with a last line that says how often its code has changed since its commit; none where it has not."""
    part = OLDER.sub("", part)
    commit, section = COMMIT.search(part), SECTIONS.get(name)
    if commit is None or section is None:
        return part
    match changes_since(commit[1], section.watched):
        case 0:
            return part
        case None:
            words = f"commit {commit[1]} is not in this history"
        case count:
            words = f"{count} commit{'s have' if count > 1 else ' has'} changed {_listed(section.watched)} since"
    return f"{part.rstrip()}\n\n*Older than the code: {words}.*\n"


def _listed(paths: tuple[str, ...]) -> str:
    return ", ".join(f"`{path}`" for path in paths)


def fill(text: str, name: str, part: str) -> str:
    """Replace what stands between the markers of `name`."""
    pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{part}\n{match[2]}", text)


def render(found: dict[str, Any]) -> str:
    """Return one benchmark's conditions, pictures, tables and targets as Markdown."""
    machine = found["machine"]
    load = f"; load {machine['load']}" if "load" in machine else ""  # files of before it was taken have none
    lines = [f"`{found['command']}` on {machine['date']}, commit {machine['commit']}.", "",
             f"{machine['processor']}, {machine['cores']} cores, {machine['memory']}, {machine['system']}; Python "
             f"{machine['python']}, torch {machine['torch']}, DeepSpeed {machine['deepspeed']}{load}.", "",
             found["note"], ""]
    for picture in found.get("pictures", ()):  # of files that were written before there were any, none
        lines += [f"![{found['benchmark']}](images/{picture})", ""]
    for sheet in found["sheets"]:
        lines += [f"**{sheet['title']}**", "", _markdown(sheet["title"], sheet["columns"], sheet["rows"]), ""]
    if found["targets"]:
        lines += ["**Targets**", "", targets_sheet([target["row"] for target in found["targets"]]).markdown(), ""]
    return "\n".join(lines)


def _markdown(title: str, columns: list[str], rows: list[list[str]]) -> str:
    return Sheet(title=title, columns=tuple(columns), rows=tuple(map(tuple, rows))).markdown()


if __name__ == "__main__":
    main()
