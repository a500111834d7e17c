"""One rank of one system: it builds, then sleeps on its standard input and runs steps when told to.

Asleep it uses no CPU, so that all systems can be alive at once and take turns. Orders and answers are lines of JSON:
`{"steps": k}` runs k steps and answers with the seconds of each, and how many of them it packed and unpacked; `{"count":
true}` answers with what has been sent so far; `{"finish": true}` answers with the totals and ends.
Bytes on the wire are read before the first step of a turn and at the end, once they stand still: a system may leave
collectives in flight when its step returns, and what they have yet to send belongs to the steps before.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any, TextIO

warnings.simplefilter("ignore")  # what other libraries deprecate is not what is measured here

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from catalogue import SYSTEMS  # noqa: E402
from packing import Packing  # noqa: E402
from wire import bytes_sent, settled_bytes_sent  # noqa: E402
from workloads import SEED, workload  # noqa: E402


def main() -> None:
    job = json.loads(sys.argv[1])
    answers = _take_standard_output()
    torch.set_num_threads(1)
    store = dist.FileStore(job["store"], job["ranks"])  # pyright: ignore[reportPrivateImportUsage]  documented as public
    dist.init_process_group("gloo", store=store, rank=job["rank"], world_size=job["ranks"])
    task = workload(job["workload"], microbatch=job["microbatch"], length=job["length"], pieces=job["pieces"])
    torch.manual_seed(SEED)
    model = task.build()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    system = SYSTEMS[job["system"]]
    step, readers = system.build(model, task), range(job["ranks"]) if system.whole else (job["rank"],)
    packing = Packing()
    packing.watch()
    _answer(answers, parameters=parameters, threads=torch.get_num_threads())
    done = 0
    for line in sys.stdin:
        order = json.loads(line)
        if "count" in order:
            _answer(answers, sockets=bytes_sent(), kinds=_kinds())
            continue
        sent = {"sockets": settled_bytes_sent(), "memory": _lent()}
        if "finish" in order:
            _answer(answers, sent=sent, steps=done, **_memory())
            break
        dist.barrier()
        seconds, packed = list[float](), list[float]()
        before = resource.getrusage(resource.RUSAGE_SELF)
        loss = torch.tensor(0.0)
        for _ in range(order["steps"]):
            inputs, targets = (torch.cat(parts) for parts in zip(*(task.batch(done, rank) for rank in readers), strict=True))
            start, spent = time.perf_counter(), packing.seconds
            loss = step(inputs, targets)
            seconds.append(time.perf_counter() - start)
            packed.append(packing.seconds - spent)
            done += 1
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        _answer(answers, seconds=seconds, packing=packed, loss=loss.item(), sent=sent, cpu=cpu / order["steps"],
                faults=(after.ru_minflt - before.ru_minflt) / order["steps"])
    os._exit(0)  # teardown of process groups is not measured, and peers may be gone


def _take_standard_output() -> TextIO:
    """Keep standard output for the answers and send what libraries print there to standard error."""
    mine = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return mine


def _answer(answers: TextIO, **facts: Any) -> None:
    answers.write(json.dumps(facts) + "\n")
    answers.flush()


def _lent() -> int:
    """Return the bytes that other ranks have read from this one's memory, which no socket counts."""
    collectives = sys.modules.get("shoal.transport.collectives")
    return collectives.traffic.peer_memory_bytes if collectives else 0


def _kinds() -> dict[str, int]:
    """Return the payload bytes that this library itself counts, by kind; nothing for other systems."""
    collectives = sys.modules.get("shoal.transport.collectives")
    return dict(collectives.traffic.bytes) if collectives else {}


def _memory() -> dict[str, int]:
    """Return the peak and the present resident bytes of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {key: int(status[field].split()[0]) * 1024 for key, field in (("peak", "VmHWM"), ("resident", "VmRSS"))}


if __name__ == "__main__":
    main()
