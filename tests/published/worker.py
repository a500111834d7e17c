"""Runs cases in one environment: `python -m tests.published.worker NAMES OUT`, each in processes of its own.

The process imports torch and `deepspeed` once and forks for every rank. With Shoal, `install` gives it that name.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import json
import os
import pkgutil
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import published

from .case import CASES, Case, plain

SECONDS = 60.0
"""A case that takes longer has hung."""


def load() -> None:
    """Import every family, which registers its cases."""
    for info in pkgutil.iter_modules(published.__path__):
        if info.name.startswith("on_"):
            importlib.import_module(f"tests.published.{info.name}")


def run(case: Case) -> Any:
    """Run one case on its ranks; return what each observed, or the text of the first error."""
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(case, rank, Path(folder)) for rank in range(case.ranks)]
        _join(children)
        found: list[Any] = []
        for rank in range(case.ranks):
            path = Path(folder) / f"found{rank}"
            log = (Path(folder) / f"log{rank}").read_text()[-1500:].splitlines()
            answer = json.loads(path.read_text()) if path.exists() else {"error": f"rank {rank} died or hung", "trace": log}
            if "error" in answer:
                return answer
            found.append(answer["found"])
        return {"found": found}


def _fork(case: Case, rank: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    os.setpgid(0, 0)
    answer: dict[str, Any]
    try:
        log = os.open(folder / f"log{rank}", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.dump_traceback_later(SECONDS / 2, file=log)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(case.ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(20000 + os.getppid() % 20000),
        )
        (folder / "work").mkdir(exist_ok=True)
        os.chdir(folder / "work")
        torch.manual_seed(0)
        store = dist.FileStore(str(folder / "store"), case.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=case.ranks, timeout=timedelta(seconds=SECONDS))
        answer = {"found": plain(case.run(**case.arguments))}
    except BaseException as error:
        lines = traceback.format_exc().splitlines()
        answer = {"error": f"{type(error).__name__}: {error}"[:500], "trace": lines[-12:]}
    (folder / f"part{rank}").write_text(json.dumps(answer))
    (folder / f"part{rank}").rename(folder / f"found{rank}")
    os._exit(0)


def _join(children: list[int]) -> None:
    end = time.monotonic() + SECONDS
    left = set(children)
    while left:
        for child in list(left):
            if os.waitpid(child, os.WNOHANG)[0]:
                left.discard(child)
        if time.monotonic() > end:
            for child in left:
                os.killpg(child, signal.SIGKILL)
        if left:
            time.sleep(0.005)


HEAVY = ("torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.engine")
"""Modules that the first optimizer or engine imports, which takes seconds; the forks find them imported."""


def prepare() -> None:
    """Do once, before the forks, what would take seconds in each: the published package compiles an extension at first."""
    deepspeed = importlib.import_module("deepspeed")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        deepspeed.init_distributed("gloo")
        deepspeed.comm.destroy_process_group()
    for name in HEAVY:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert name.startswith("deepspeed"), name


def main(names: str, out: str) -> None:
    """Run the cases that the JSON list `names` has, and append a line with what each observed to `out`."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(1)
    if importlib.util.find_spec("shoal") is not None:
        importlib.import_module("shoal.compat").install()
    importlib.import_module("deepspeed")
    prepare()
    load()
    with Path(out).open("a") as lines:
        for name in json.loads(Path(names).read_text()):
            print(json.dumps([name, run(CASES[name])]), file=lines, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
