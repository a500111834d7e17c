"""Collectives under torch.distributed's names, and the report of all recorded collectives of this job.

    import shoal.comm as dist

    dist.init_distributed()
    dist.all_reduce(loss)
    dist.log_summary(show_straggler=True)

The functions are torch.distributed's own, counted like the library's (`traffic`) and recorded with them while
`comms_logger` is on. A collective takes three more keywords: `prof` (record this call whatever `prof_ops` says), `log_name`
(the name under which it is counted) and `debug` (no effect on one call; the section's `debug` is for all). A call with
`async_op` is counted but has no time, because its `wait` is torch's own.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, Literal, overload

import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    ReduceOp,
    destroy_process_group,
    get_global_rank,
    get_rank,
    get_world_size,
    irecv,
    is_available,
    is_initialized,
    isend,
    new_group,
    recv,
)

from shoal.config.problem import raise_all
from shoal.config.resolve import resolve
from shoal.log import warn_once
from shoal.recording import CallStats, Lateness, Recorder, over, traffic
from shoal.recording.call import Stamps
from shoal.recording.report import bytes_table, lateness_table, published, stats_table
from shoal.recording.settings import CommsLoggerSettings
from shoal.recording.stats import RecentCalls, Wait, bus_factor, lateness, offsets
from shoal.transport import process_group
from shoal.transport.collectives import native_all_gather, native_reduce_scatter
from shoal.transport.process_group import init_distributed
from shoal.transport.process_group import local_rank as get_local_rank

__all__ = [
    "ReduceOp", "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all_single", "allgather_fn", "barrier",
    "broadcast", "configure", "destroy_process_group", "get_all_ranks_from_group", "get_global_rank", "get_local_rank",
    "get_rank", "get_world_group", "get_world_size", "init_distributed", "irecv", "is_available", "is_initialized", "isend",
    "log_summary", "new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_fn", "reduce_scatter_tensor",
    "reset_log", "send",
]  # fmt: skip

_WIDTH = 160
"""Columns of a table that is not printed to a terminal."""

_ROUNDS = 5
"""All-gathers from which the offsets of the ranks' clocks are estimated."""


def configure(deepspeed_config: Mapping[str, Any] | None = None, enabled: bool | None = None, prof_all: bool | None = None,
              prof_ops: list[str] | None = None, verbose: bool | None = None, debug: bool | None = None) -> None:
    """Switch the record on or off according to `comms_logger` of a configuration; keywords take precedence.

    Earlier records stay until `reset_log`. Raises `ConfigError` for values that the section does not allow.
    """
    section = (deepspeed_config or {}).get("comms_logger")
    given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    found = resolve(CommsLoggerSettings, {**(section if section is not None else {"enabled": False}),
                                          **{key: value for key, value in given.items() if value is not None}})
    raise_all([replace(problem, path=f"comms_logger.{problem.path}") for problem in found.findings.problems], "configure")
    record(found.section)


def record(settings: CommsLoggerSettings) -> None:
    """Record the following calls according to `settings`."""
    if not settings.enabled:
        traffic.recorder = None
    elif traffic.recorder is None:
        traffic.recorder = Recorder(settings, is_logging_rank=not is_initialized() or get_rank() == 0)
    else:
        traffic.recorder.update_settings(settings)


def reset_log() -> None:
    """Discard all records."""
    if traffic.recorder is not None:
        settings, traffic.recorder = traffic.recorder.settings, None
        record(settings)


@overload
def log_summary(show_straggler: bool = False, return_dict: Literal[False] = False) -> list[CallStats]: ...
@overload
def log_summary(show_straggler: bool = False, *, return_dict: Literal[True]) -> dict[str, Any]: ...


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> list[CallStats] | dict[str, Any]:
    """Print the record on rank 0; a collective call over the job.

    With `show_straggler` also print which ranks were last to launch the kept collectives (the latest 256 of each name), and
    how long the others waited for them. Return this rank's statistics, or with `return_dict` their published form.
    """
    recorder = traffic.recorder
    if recorder is None:
        warn_once('log_summary: nothing is recorded; give "comms_logger": {} in the configuration, or call '
                  "shoal.comm.configure(enabled=True) first")
    else:
        recorder.wait_for_calls()
    rows = [] if recorder is None else recorder.rows
    sent = _gather(dict(_by_kind(rows)))
    rank = get_rank() if is_initialized() else 0
    ranks: list[Lateness] | None = None
    waits: dict[Any, Wait] = {}
    if show_straggler:
        ahead = offsets([_timed_round() for _ in range(_ROUNDS)])
        recent = _gather({} if recorder is None else recorder.recent)
        ranks, waits = lateness([_shifted(calls, by) for calls, by in zip(recent, ahead, strict=True)])
    if rank == 0:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else _WIDTH)
        console.print(stats_table(rows, waits, rank))
        console.print(bytes_table(sent, rank))
        if ranks is not None:
            console.print(lateness_table(ranks))
    return published(rows, ranks, waits, rank) if return_dict else rows


def get_world_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the ranks of the job that are in `group`, in its order."""
    return dist.get_process_group_ranks(group)


def _counted(function: Callable[..., Any], op: str, buffer: str | None = None) -> Callable[..., Any]:
    """Wrap torch's `function` so that it is counted; `buffer` names the argument with the whole buffer."""
    signature = inspect.signature(function)

    @wraps(function)
    def counted(*args: Any, prof: bool = False, log_name: str | None = None, debug: str | None = None,
                **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        group = given.get("group")
        if dist.get_rank(group) < 0:  # this rank is not in the group
            return function(*args, **kwargs)
        ranks = tuple(dist.get_process_group_ranks(group))
        whole = () if buffer is None else given[buffer]
        tensors = [whole] if isinstance(whole, Tensor) else list(whole)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        call = traffic.count(log_name or function.__name__, _sent(op, size, ranks, given), op=op, of=tensors, ranks=ranks,
                             requested=prof)
        return over(None if given.get("async_op") else call, lambda: function(*args, **kwargs))

    return counted


def _sent(op: str, size: int, ranks: tuple[int, ...], given: Mapping[str, Any]) -> int:
    """Return the bytes that this rank sends if the backend sends the minimum."""
    if op == "broadcast":
        return size if _is_root(given, "src") else 0
    if op == "reduce":
        return 0 if _is_root(given, "dst") else size
    return int(bus_factor(op, len(ranks)) * size)


def _is_root(given: Mapping[str, Any], name: str) -> bool:
    within = given.get(f"group_{name}")
    return get_rank(given.get("group")) == within if within is not None else get_rank() == given.get(name)


all_reduce = _counted(dist.all_reduce, "all_reduce", "tensor")
reduce = _counted(dist.reduce, "reduce", "tensor")
broadcast = _counted(dist.broadcast, "broadcast", "tensor")
all_gather = _counted(dist.all_gather, "all_gather", "tensor_list")
all_gather_into_tensor = allgather_fn = _counted(native_all_gather, "all_gather", "output_tensor")
reduce_scatter = _counted(dist.reduce_scatter, "reduce_scatter", "input_list")
reduce_scatter_tensor = reduce_scatter_fn = _counted(native_reduce_scatter, "reduce_scatter", "input")
all_to_all_single = _counted(dist.all_to_all_single, "all_to_all", "input")
send = _counted(dist.send, "send", "tensor")
barrier = _counted(dist.barrier, "barrier")


def _by_kind(rows: list[CallStats]) -> Counter[str]:
    sent = Counter[str]()
    for row in rows:
        sent[row.key.kind] += row.sent
    return sent


def _gather(value: Any) -> list[Any]:
    return process_group.gather_objects(value, "the log of collectives") if is_initialized() else [value]


def _timed_round() -> list[tuple[float, float]]:
    """Return the start and end of one all-gather on each rank, by its own clock."""
    before = time.monotonic()
    _gather(None)
    return _gather((before, time.monotonic()))


def _shifted(recent: RecentCalls, seconds: float) -> RecentCalls:
    """Return the calls of a rank whose clock is `seconds` ahead, with moments on rank 0's clock."""
    return {name: [(number, Stamps(it.began - seconds, it.waiting - seconds, it.ended - seconds)) for number, it in calls]
            for name, calls in recent.items()}
