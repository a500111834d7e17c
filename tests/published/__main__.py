"""Compares the two packages: `python -m tests.published [--only word] [--verbose]`; needs `make peers`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from .case import differences

ROOT = Path(__file__).parents[2]
PEER = ROOT / ".venv-peers" / "bin" / "python"


def start(python: str, out: Path, only: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([python, "-m", "tests.published.worker", str(out), *only], cwd=ROOT,
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def observe(only: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the cases in both environments beside each other; return what each package showed."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / "ours.json", Path(folder) / "theirs.json"]
        running = [start(python, out, only) for python, out in zip((sys.executable, str(PEER)), outs, strict=True)]
        for process in running:
            _, errors = process.communicate()
            if process.returncode:
                raise SystemExit(errors.decode()[-2000:])
        ours, theirs = (json.loads(out.read_text()) for out in outs)
        return ours, theirs


def verdict(ours: Any, theirs: Any) -> list[str] | None:
    """Return how the two differ, or None where the published package itself fails."""
    if "error" in theirs:
        return None
    if "error" in ours:
        return [ours["error"], *(f"    {line}" for line in ours.get("trace", []))]
    return list(differences(ours["found"], theirs["found"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="words, one of which the name has")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks, and what fails on the published package")
    options = parser.parse_args()
    ours, theirs = observe(options.only)
    total, same = Counter[str](), Counter[str]()
    for name, expected in theirs.items():
        found = verdict(ours[name], expected)
        if found is None:
            print(f"fails there  {name}: {expected['error'][:200]}")
            if options.verbose:
                print("\n".join(expected.get("trace", [])))
            continue
        family = name.partition(".")[0].removeprefix("on_")
        total[family] += 1
        same[family] += not found
        if found:
            print(f"differs      {name}: {found[0][:300]}")
            for line in found[1:] if options.verbose else ():
                print(f"             {line[:200]}")
    print("| family | cases that pass on DeepSpeed | of these on Shoal |")
    print("|---|---|---|")
    for family in total:
        print(f"| {family} | {total[family]} | {same[family]} |")
    count, equal = total.total(), same.total()
    print(f"| all | {count} | {equal} ({equal / max(count, 1):.1%}) |")


if __name__ == "__main__":
    main()
