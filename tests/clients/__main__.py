"""Run the client scripts, each in processes of its own, and print a table: `make clients`.

    python -m tests.clients                      every script at stages 0, 2 and 3, in fp32 and bf16
    python -m tests.clients --only trainer       the rows whose client contains that word
    python -m tests.clients --peers              each row also with the published package, of `.venv-peers`
    python -m tests.clients --times 50           each row so often: no run may fail, at its exit either
    python -m tests.clients --peers --times 5 --options '--steps 24'    the ratios, each the median of 5 pairs in turns
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 300
"""A script that takes longer has hung."""

LAUNCH = ("-m", "accelerate.commands.launch", "--use_deepspeed", "--num_machines", "1", "--zero_stage", "2",
          "--zero3_save_16bit_model", "true", "--gradient_clipping", "1.0", "--mixed_precision", "no",
          "--dynamo_backend", "no", "--main_process_port", "0")
"""Options of `accelerate launch` that its configuration file would hold."""
BY_FILE = ("-m", "accelerate.commands.launch", "--config_file", str(ROOT / "tests/clients/accelerate_stage3.yaml"),
           "--main_process_port", "0")
"""Such a file, in the form that `accelerate config` writes."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run of a script."""

    client: str
    script: str
    options: tuple[str, ...]
    ranks: int = 1
    launcher: tuple[str, ...] = ()
    """`accelerate launch` and its options, which finds DeepSpeed from a process of its own; by default torchrun."""

    @property
    def name(self) -> str:
        return f"{self.client} {' '.join(self.options)}"


def rows() -> Iterator[Row]:
    for stage in ("0", "2", "3"):
        for dtype in ("fp32", "bf16"):
            common = ("--stage", stage, "--dtype", dtype)
            yield Row("Accelerate", "accelerate_loop.py", common, 2)
            yield Row("Trainer", "trainer.py", common, 2 if stage == "3" else 1)
            yield Row("PEFT LoRA", "peft_lora.py", common)
            yield Row("TRL SFT", "trl_sft.py", common)
            yield Row("Lightning", "lightning_fit.py", common)
    yield Row("Accelerate", "accelerate_loop.py", ("--stage", "1", "--named", "--accumulation", "2"), 2)
    yield Row("Accelerate", "accelerate_loop.py", ("--stage", "2", "--offload", "--plain"))
    yield Row("accelerate launch", "accelerate_loop.py", ("--stage", "2", "--launched"), 2, launcher=LAUNCH)
    yield Row("accelerate launch", "accelerate_loop.py", ("--stage", "3", "--launched"), 2, launcher=BY_FILE)
    yield Row("Trainer", "trainer.py", ("--stage", "2", "--offload", "--client"))
    yield Row("Trainer", "trainer.py", ("--stage", "3", "--offload", "--accumulation", "2"), 2)
    for stage in ("2", "3"):
        yield Row("Accelerate sequence", "sequence_loop.py", ("--stage", stage), 2)
        yield Row("Trainer sequence", "sequence_loop.py", ("--stage", stage, "--trainer"), 2)
    yield Row("PEFT LoRA", "peft_lora.py", ("--stage", "3", "--pretrained"), 2)
    yield Row("Lightning", "lightning_fit.py", ("--stage", "3", "--devices", "2", "--dim", "320"), 2)  # released weights
    for trainer in ("dpo", "kto", "reward", "grpo", "rloo"):
        yield Row("TRL", "trl_trainers.py", ("--stage", "3", "--trainer", trainer), 2)
    yield Row("from_pretrained", "from_pretrained.py", ("--stage", "3"), 2)
    yield Row("ShoalAccelerator", "own_accelerator.py", ("--stage", "3", "--accumulation", "2"), 2)
    yield Row("ShoalStrategy", "lightning_fit.py", ("--stage", "2", "--own"))
    yield Row("ShoalStrategy", "lightning_fit.py", ("--stage", "3", "--own", "--devices", "2"), 2)


def run(row: Row, python: Path, folder: Path) -> dict[str, Any]:
    """Run one row by this interpreter, and return what the script reports, or `error`."""
    script = str(ROOT / "tests" / "clients" / row.script)
    start = [*row.launcher, "--num_processes", str(row.ranks)] if row.launcher else [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(row.ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false",
                   "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    command = [str(python), *start, script, *row.options, "--folder", str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # the launcher passes it on to its ranks
        out, err = process.communicate(timeout=SECONDS)
        return {"error": f"did not finish within {SECONDS} s", "log": out + err}
    printed = [line.removeprefix("REPORT ") for line in out.splitlines() if line.startswith("REPORT ")]
    if process.returncode or not printed:
        said = [line for line in err.splitlines() if "Error" in line and "ChildFailed" not in line]
        return {"error": (said or [f"exit status {process.returncode}"])[0], "log": out + err}
    return json.loads(printed[-1])


def line(row: Row, found: dict[str, Any], peer: dict[str, Any] | None) -> str:
    text = f"{row.client:19} {' '.join(row.options):52} {row.ranks:5}  "
    if "error" in found:
        return text + f"FAILED: {found['error'][:200]}"
    text += f"{found['losses'][-1]:8.4f} {found.get('seconds', 0) * 1e3:8.1f} {found['peak_mb']:8}  ok"
    if peer is None:
        return text
    if "error" in peer:
        return text + f"   published: {peer['error'][:80]}"
    apart = max(abs(a - b) for a, b in zip(found["losses"], peer["losses"], strict=True))
    step = f" step {found['seconds'] / peer['seconds']:.2f} x," if peer.get("seconds") else ""
    return text + f"   losses apart by {apart:.1e},{step} memory {found['peak_mb'] / peer['peak_mb']:.2f} x"


def summary(row: Row, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """Return the medians of a row that ran several times beside the published package: each pair ran one after the other."""
    text = f"{row.client:19} {' '.join(row.options):52} median of {len(pairs)} pairs:"
    timed = [found["seconds"] / peer["seconds"] for found, peer in pairs if found.get("seconds") and peer.get("seconds")]
    if timed:
        milliseconds = statistics.median(found["seconds"] for found, _ in pairs) * 1e3
        text += f" {milliseconds:.1f} ms, step {statistics.median(timed):.2f} x ({min(timed):.2f} to {max(timed):.2f}),"
    return text + f" memory {statistics.median(found['peak_mb'] / peer['peak_mb'] for found, peer in pairs):.2f} x"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="run the rows that contain it")
    parser.add_argument("--peers", action="store_true", help="compare with the published package in .venv-peers")
    parser.add_argument("--options", default="", help="options that every script gets, such as '--dim 256 --layers 4'")
    parser.add_argument("--times", type=int, default=1, help="run each row so often")
    args = parser.parse_args()
    failed, options = 0, tuple(args.options.split())
    print(f"{'client':19} {'options':52} ranks      loss  ms/step  peak MB", flush=True)
    for row in rows():
        if args.only.lower() not in row.name.lower():
            continue
        row = replace(row, options=(*row.options, *options))
        pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for _ in range(args.times):
            found = run(row, ROOT / ".venv-clients/bin/python", ROOT / "out/clients/ours")
            comparable = args.peers and row.client not in ("ShoalAccelerator", "ShoalStrategy")
            peer = run(row, ROOT / ".venv-peers/bin/python", ROOT / "out/clients/published") if comparable else None
            failed += "error" in found
            print(line(row, found, peer), flush=True)
            if peer is not None and "error" not in found | peer:
                pairs.append((found, peer))
            if "log" in found:
                (ROOT / "out/clients").mkdir(parents=True, exist_ok=True)
                (ROOT / "out/clients" / f"{row.script}.log").write_text(found["log"])
        if len(pairs) > 1:
            print(summary(row, pairs), flush=True)
    print("all clients run" if not failed else f"{failed} rows failed; their output is in out/clients/*.log")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
