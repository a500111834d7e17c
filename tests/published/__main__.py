"""Compares the two packages, after `make peers`:

python -m tests.published                        all cases on both; prints what differs, and the share that agrees
python -m tests.published --only on_comm tiles   those whose name has one of the words
python -m tests.published --most 6               at most so many of each function
python -m tests.published --record               and keep what DeepSpeed showed for the cases that the suite runs
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from shoal.compat import install

from .case import CASES, chosen, quick, rounded, verdict
from .worker import load

ROOT = Path(__file__).parents[2]
PEER = ROOT / ".venv-peers" / "bin" / "python"
RECORDED = Path(__file__).parent / "recorded.json"
KEPT = ROOT / "out" / "published" / "theirs.json"
"""What the published package showed, by case and its source; it is run again where the source changed."""


def start(python: str, names: list[str], out: Path) -> subprocess.Popen[bytes]:
    asked = out.with_suffix(".names")
    asked.write_text(json.dumps(names))
    return subprocess.Popen(
        [python, "-m", "tests.published.worker", str(asked), str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # forks of a process with threads of OpenMP can hang
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def answers(out: Path) -> dict[str, Any]:
    """Read what a worker wrote."""
    return dict(json.loads(line) for line in out.read_text().splitlines()) if out.exists() else {}


def key(name: str) -> str:
    return f"{name} {hashlib.sha1(inspect.getsource(CASES[name].run).encode()).hexdigest()[:8]}"


def observe(names: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the cases in both environments beside each other; return what each package showed."""
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    missing = [name for name in names if key(name) not in kept]
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / "ours", Path(folder) / "theirs"]
        running = [start(sys.executable, names, outs[0]), *([start(str(PEER), missing, outs[1])] if missing else [])]
        try:
            for process in running:
                _, errors = process.communicate()
                if process.returncode:
                    raise SystemExit(errors.decode()[-2000:])
        finally:
            for process in running:
                process.kill()
            kept |= {key(name): answer for name, answer in answers(outs[1]).items()}
            KEPT.write_text(json.dumps(kept))
        return answers(outs[0]), {name: kept[key(name)] for name in names}


def record(theirs: dict[str, Any]) -> None:
    """Keep the answers of quick cases for the suite, which has no DeepSpeed; the others that were kept stay."""
    held: dict[str, Any] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    held |= {name: rounded(answer["found"]) for name, answer in theirs.items() if "found" in answer and quick(CASES[name])}
    lines = (f"{json.dumps(name)}: {json.dumps(held[name], separators=(',', ':'))}" for name in held if name in CASES)
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words, one of which the name has")
    parser.add_argument("--most", type=int, help="cases of each function, spread over its arguments")
    parser.add_argument("--record", action="store_true", help=f"write {RECORDED.name}")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks and all differences")
    options = parser.parse_args()
    install()
    load()
    ours, theirs = observe(chosen(options.only, options.most))
    total, same = Counter[str](), Counter[str]()
    for name, expected in theirs.items():
        if "error" in expected:
            print(f"fails there  {name}: {expected['error'][:200]}")
            continue
        family = name.partition(".")[0].removeprefix("on_")
        found = verdict(ours[name], expected["found"])
        total[family] += 1
        same[family] += not found
        for line in found if options.verbose else found[:1]:
            print(f"differs      {name}: {line[:300]}")
    print("| family | cases that pass on DeepSpeed | of these on Shoal |")
    print("|---|---|---|")
    for family in total:
        print(f"| {family} | {total[family]} | {same[family]} |")
    count, equal = total.total(), same.total()
    print(f"| all | {count} | {equal} ({equal / max(count, 1):.1%}) |")
    if options.record:
        record(theirs)


if __name__ == "__main__":
    main()
