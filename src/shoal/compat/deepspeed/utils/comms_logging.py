"""The published log of collectives: latencies in milliseconds and bandwidths in Gbit/s, by name and message size.

    throughput      bits of the message over time; both directions of an all-reduce count
    bus bandwidth   bits on each rank's link over time

Source of the formulas: NVIDIA's nccl-tests, "Performance reported by NCCL tests".
"""

from __future__ import annotations

import inspect
from datetime import datetime
from typing import Any

import torch.distributed as dist

from shoal.compat.deepspeed.utils.logging import log_dist, logger
from shoal.errors import UsageError
from shoal.transport.process_group import gather_objects

__all__ = ["CommsLogger", "calc_bw_log", "convert_size", "get_caller_func", "print_rank_0"]

Records = dict[str, dict[int, list[Any]]]
"""Name -> message size -> calls, latencies, throughputs, bus bandwidths."""

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")
_GATHERING = ("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor")
_REDUCING = ("all_reduce", "all_reduce_coalesced", "inference_all_reduce")
_EXCHANGING = ("all_to_all", "all_to_all_single")
_ONE_WAY = ("broadcast", "broadcast_object_list", "reduce", "send", "recv", "isend", "irecv", "gather", "scatter", "barrier")


class _NoSuchOperation(UsageError, ValueError):
    """A collective without a formula."""


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def get_caller_func(frame: int = 3) -> str:
    """Return the name of the function that is `frame` calls above this one."""
    return inspect.stack()[frame].function


def print_rank_0(message: str) -> None:
    """Log a message on rank 0."""
    log_dist(message, ranks=[0])


def convert_size(size_bytes: int) -> str:
    """Return a number of bytes in words, such as '4.88 KB'."""
    if size_bytes == 0:
        return "0B"
    power = min((size_bytes.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{round(size_bytes / 1024**power, 2)} {_UNITS[power]}"


def calc_bw_log(comm_op: str, size: int, duration: float) -> tuple[float, float]:
    """Return throughput and bus bandwidth in Gbit/s of a message of `size` bytes that took `duration` milliseconds.

    Raises `ValueError` for an operation that is unknown.
    """
    ranks, share = _ranks(), (_ranks() - 1) / _ranks()
    if comm_op in _REDUCING:
        sent, busy = 2.0 * size, 2.0 * size * share
    elif comm_op in _GATHERING:
        sent, busy = float(size * ranks), size * ranks * share
    elif comm_op in _EXCHANGING:
        sent, busy = float(size), size * share
    elif comm_op in _ONE_WAY:
        sent, busy = float(size), float(size)
    else:
        known = ", ".join((*_REDUCING, *_GATHERING, *_EXCHANGING, *_ONE_WAY))
        raise _NoSuchOperation(f"calc_bw_log: got {comm_op!r}; choose one of {known}")
    scale = 8 / 1e6 / max(duration, 1e-9)
    return sent * scale, busy * scale


class CommsLogger:
    """Collects the calls that `append` tells it."""

    def __init__(self) -> None:
        self.comms_dict: Records = {}
        self.verbose = False
        self.debug = False
        self.prof_ops: list[str] = []
        self.prof_all = True
        self.enabled = False

    def configure(self, comms_config: Any) -> None:
        """Take the settings of a `DeepSpeedCommsConfig`; without the section nothing changes."""
        if comms_config.comms_logger_enabled:
            section = comms_config.comms_logger
            self.enabled, self.verbose, self.debug = section.enabled, section.verbose, section.debug
            self.prof_ops, self.prof_all = list(section.prof_ops), section.prof_all

    def start_profiling_comms(self) -> None:
        """Collect all operations."""
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Collect only the operations in `prof_ops`."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: list[str]) -> None:
        """Add to the operations that are collected."""
        self.prof_ops = sorted({*self.prof_ops, *op_name_list})

    def stop_profiling_op(self, op_name_list: list[str]) -> None:
        """Remove from the operations that are collected."""
        self.prof_ops = [name for name in self.prof_ops if name not in op_name_list]

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Add a call of the operation `raw_name`, under a name of its own."""
        throughput, bus = calc_bw_log(raw_name, msg_size, latency)
        record = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        record[0] += 1
        for values, value in zip(record[1:], (latency, throughput, bus), strict=True):
            values.append(value)
        if self.verbose:
            print_rank_0(f"comm op: {record_name} | time (ms): {latency:.2f} | msg size: {convert_size(msg_size)} | algbw "
                         f"(Gbps): {throughput:.2f} | busbw (Gbps): {bus:.2f}")

    def get_raw_data(self) -> Records:
        """Return a copy of the records."""
        return {name: dict(sizes) for name, sizes in self.comms_dict.items()}

    def has_data(self) -> bool:
        """Whether there is a call."""
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        """Forget all calls."""
        self.comms_dict.clear()

    def get_operation_names(self) -> list[str]:
        """Return the names of the calls."""
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        """Return the number of calls."""
        return sum(record[0] for sizes in self.comms_dict.values() for record in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """Return the means of the calls of a name, by message size; None if there are none."""
        if operation_name not in self.comms_dict:
            return None
        return {size: {"count": record[0], "total_latency_ms": sum(record[1]), "avg_latency_ms": _mean(record[1]),
                       "tput_avg_gbps": _mean(record[2]), "busbw_avg_gbps": _mean(record[3]), "msg_size_bytes": size,
                       "msg_size_str": convert_size(size)} for size, record in self.comms_dict[operation_name].items()}

    def log_all(self, print_log: bool = True, show_straggler: bool = False,
                return_dict: bool = False) -> dict[str, Any] | None:
        """Log the means of all calls; with `return_dict` return them. With `show_straggler` every rank calls it."""
        summary = {name: self.get_operation_summary(name) or {} for name in self.comms_dict}
        waits = self._stragglers() if show_straggler else None
        if print_log:
            for name, sizes in {**summary, **(waits or {})}.items():
                for values in sizes.values():
                    logger.info("%s: %s", name, ", ".join(f"{key} {value}" for key, value in values.items()))
        rank = dist.get_rank() if dist.is_initialized() else 0
        metadata = {"world_size": _ranks(), "rank": rank, "timestamp": datetime.now().isoformat()}
        return {"summary": summary, "straggler_analysis": waits, "metadata": metadata} if return_dict else None

    def _stragglers(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Return the seconds that this rank's calls took over those of the quickest rank."""
        mine = {name: {size: record[1] for size, record in sizes.items()} for name, sizes in self.comms_dict.items()}
        by_rank = gather_objects(mine, "log_all: latencies") if dist.is_initialized() else [mine]
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for name, sizes in mine.items():
            for size, latencies in sizes.items():
                others = [each[name][size] for each in by_rank if size in each.get(name, {})]
                quickest = [min(calls) for calls in zip(*others, strict=False)]
                late = [mine - least for mine, least in zip(latencies, quickest, strict=False)]
                found.setdefault(name, {})[size] = {
                    "count": len(latencies), "total_comm_lat_ms": sum(quickest), "total_straggler_ms": sum(late),
                    "avg_comm_lat_ms": _mean(quickest), "avg_straggler_ms": _mean(late), "msg_size_bytes": size,
                    "msg_size_str": convert_size(size)}
        return found


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
