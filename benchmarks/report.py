"""Render what was measured into docs/measurements.md, between its markers.

    python benchmarks/report.py [FOLDER]

Every file of out/benchmarks (or FOLDER) named after a benchmark fills the part of the page between
`<!-- NAME -->` and `<!-- /NAME -->`; parts without a file stay as they are.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from machine import ROOT
from outcome import FOLDER, Sheet, targets_sheet

PAGE = ROOT / "docs" / "measurements.md"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    text = PAGE.read_text()
    for name in re.findall(r"<!-- ([\w-]+) -->", text):
        file = folder / f"{name}.json"
        if file.exists():
            text = fill(text, name, render(json.loads(file.read_text())))
            sys.stdout.write(f"{name}: from {file}\n")
        else:
            sys.stdout.write(f"{name}: no {file}, left as it is\n")
    PAGE.write_text(text)


def fill(text: str, name: str, part: str) -> str:
    """Replace what stands between the markers of `name`."""
    pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{part}\n{match[2]}", text)


def render(found: dict[str, Any]) -> str:
    """Return one benchmark's conditions, pictures, tables and targets as Markdown."""
    machine = found["machine"]
    lines = [f"`{found['command']}` on {machine['date']}, commit {machine['commit']}.", "",
             f"{machine['processor']}, {machine['cores']} cores, {machine['memory']}, {machine['system']}; Python "
             f"{machine['python']}, torch {machine['torch']}, DeepSpeed {machine['deepspeed']}.", "", found["note"], ""]
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
