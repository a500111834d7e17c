"""Make sections of docs/measurements.md anew: run the command of each, then render what it found into the page.

    python benchmarks/record.py --list                    # the sections, their commands, and about how long each takes
    python benchmarks/record.py tuning-2 zero-2           # measures, and renders these sections
    python benchmarks/record.py                           # marks sections that are older than the code that they measure

Before each section it waits until the machine is idle, for `--wait` minutes at most. A section whose command fails keeps
what the page says. Everything else of the page is written by hand.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time

import render_page
from machine import ROOT
from results import FOLDER
from sections import SECTIONS

QUIET = 0.5
"""Busy processes, in the mean of a minute, that disturb no measurement of time."""


def main() -> None:
    options = _options()
    if unknown := [name for name in options.sections if name not in SECTIONS]:
        sys.exit(f"record: got {', '.join(unknown)}; choose from {', '.join(SECTIONS)}")
    if options.list:
        for name, section in SECTIONS.items():
            needs = f"  ({section.needs})" if section.needs else ""
            sys.stdout.write(f"{name}: about {section.minutes} min: python benchmarks/{section.command}{needs}\n")
        return
    failed: list[str] = []
    for name in options.sections:
        _wait_until_idle(options.wait)
        if not _run(name):
            failed.append(name)
    render_page.fill_page(FOLDER, [name for name in options.sections if name not in failed])
    if failed:
        sys.exit(f"record: failed, and left as they were: {', '.join(failed)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="which to make anew")
    parser.add_argument("--list", action="store_true", help="show the sections")
    parser.add_argument("--wait", type=float, default=10.0, help="minutes for which a busy machine is waited for (10)")
    return parser.parse_args()


def _wait_until_idle(minutes: float) -> None:
    """Wait until the load is low, also after the section before; after so many minutes go on, and say so."""
    deadline = time.monotonic() + 60 * minutes
    while (load := os.getloadavg()[0]) > QUIET:
        if time.monotonic() > deadline:
            sys.stderr.write(f"record: the load is {load:.1f}: times are of a busy machine, and the page will say so\n")
            return
        time.sleep(5)


def _run(name: str) -> bool:
    """Run the command of a section; return whether it wrote its file."""
    file = FOLDER / f"{name}.json"
    before = file.stat().st_mtime_ns if file.exists() else 0
    script, *words = shlex.split(SECTIONS[name].command)
    done = subprocess.run([sys.executable, f"benchmarks/{script}", *words], cwd=ROOT, check=False)
    return done.returncode == 0 and file.exists() and file.stat().st_mtime_ns > before


if __name__ == "__main__":
    main()
