"""The record has every call and byte sent, at every stage and on every axis, and names late ranks."""

from __future__ import annotations

import contextlib
import io
import logging
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shoal
from shoal import comm
from shoal.engine.engine import Engine
from shoal.engine.schema import Config
from shoal.errors import ConfigError
from shoal.pipeline.module import PipelineModule
from shoal.recording import CallStats, Recorder, Watched
from shoal.recording.settings import CommsLoggerSettings
from shoal.tensor_parallel.axis import Axis
from shoal.testing import run_ranks
from shoal.transport.collectives import Communicator, Label, traffic

from ..pipeline.small import Case, data
from ..zero.test_cost import Wide

UNITS = 7
GATHER = Label(kind="gather", unit="blocks.0", index=0)


def recorder(**settings: Any) -> Recorder:
    """Start recording, and return the record."""
    comm.record(CommsLoggerSettings(enabled=True, **settings))
    comm.reset_log()
    assert traffic.recorder is not None
    return traffic.recorder


def communicator(**extra: Any) -> Communicator:
    assert dist.group.WORLD is not None
    return Communicator(dist.group.WORLD, timeout=20, **extra)


def gather(ranks: Communicator, elements: int = 100) -> None:
    ranks.all_gather(torch.ones(elements * ranks.ranks), GATHER).wait()


def totals(rows: list[CallStats]) -> tuple[dict[str, int], dict[str, int]]:
    calls, sent = Counter[str](), Counter[str]()
    for row in rows:
        calls[row.key.kind] += row.calls
        sent[row.key.kind] += row.sent
    return dict(calls), dict(sent)


def trained(stage: int) -> tuple[dict[str, int], bool, bool]:
    """Return the calls of a step, and whether calls and bytes equal those of `traffic` and all calls ended."""
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "timeout": 20,
                              "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "comms_logger": {}}
    engine: Engine = shoal.initialize(model=Wide(), config=config)[0]
    for _ in range(2):
        comm.reset_log()
        calls, sent = traffic.calls.copy(), traffic.bytes.copy()
        engine.backward(engine(torch.randn(2, 64)).pow(2).mean())
        engine.step()
        if stage < 3:
            engine.module.state_dict()  # waits for what is under way
    assert traffic.recorder is not None and engine.sharded is not None
    found = totals(traffic.recorder.rows)
    same = found == (dict(traffic.calls - calls), dict(traffic.bytes - sent))
    engine.sharded.finish_pending()
    rows = traffic.recorder.rows
    return found[0], same, all(row.timed == row.calls and row.seconds >= row.exposed >= 0 for row in rows)


@pytest.mark.parametrize("stage", range(4))
def test_a_step_makes_the_calls_of_the_formula_and_records_all_of_them(stage: int) -> None:
    weights = {0: {"replicate": UNITS}, 3: {"gather": 2 * UNITS}}.get(stage, {"publish": UNITS})
    for calls, same, ended in run_ranks(2, trained, stage):
        assert calls == {"reduce": UNITS, "words": 1, **weights}
        assert same and ended


def on_an_axis() -> tuple[bool, set[str], bool]:
    record = recorder()
    assert dist.group.WORLD is not None
    axis = Axis(dist.group.WORLD)
    for size in (8, 1 << 19):
        axis.all_reduce(torch.ones(size)).wait()
        axis.all_gather(torch.ones(size)).wait()
        axis.reduce_scatter(torch.ones(axis.ranks, size)).wait()
    rows = record.rows
    sent = {kind: size for kind, size in traffic.bytes.items()}
    return totals(rows) == (dict(traffic.calls), sent), {row.key.op for row in rows}, all(row.timed for row in rows)


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensor_collectives_are_recorded_by_ring_and_by_socket(ranks: int) -> None:
    for same, operations, ended in run_ranks(ranks, on_an_axis):
        assert same and ended
        assert operations == {"all_gather", "reduce_scatter"} | ({"all_reduce"} if ranks == 2 else set())


def in_a_pipeline() -> tuple[bool, int]:
    case = Case(stages=2)
    module: PipelineModule = case.module()
    engine = shoal.initialize(model=module, config=case.settings | {"comms_logger": {}})[0]
    comm.reset_log()
    calls, sent = traffic.calls.copy(), traffic.bytes.copy()
    engine.train_batch(data(0, 0))
    assert traffic.recorder is not None
    rows = traffic.recorder.rows
    same = totals(rows)[0] == dict(traffic.calls - calls)
    return same and totals(rows)[1]["pipeline"] == traffic.bytes["pipeline"] - sent["pipeline"], sum(
        row.timed for row in rows if row.key.kind == "pipeline")


def test_messages_of_a_pipeline_are_counted_and_have_no_time() -> None:
    assert run_ranks(2, in_a_pipeline) == [(True, 0)] * 2


def off_and_on() -> list[bool]:
    ranks = communicator()
    found = [isinstance(ranks.all_gather(torch.ones(2 * ranks.ranks), GATHER), Watched)]
    record = recorder()
    handle = ranks.all_gather(torch.ones(2 * ranks.ranks), GATHER)
    found.append(isinstance(handle, Watched))
    handle.wait()
    handle.wait()
    found.append([row.timed for row in record.rows] == [1])
    comm.configure(enabled=False)
    gather(ranks)
    return [*found, [row.calls for row in record.rows] == [1], traffic.recorder is None]


def test_no_handle_is_wrapped_or_recorded_while_the_record_is_off() -> None:
    assert run_ranks(1, off_and_on)[0] == [False, True, True, True, True]


def selected() -> list[dict[str, int]]:
    ranks = communicator()
    found = []
    for settings in ({"prof_all": False}, {"prof_all": False, "prof_ops": ["all_gather_into_tensor"]},
                     {"prof_all": True, "prof_ops": ["broadcast"]}):
        record = recorder(**settings)
        gather(ranks)
        ranks.broadcast(torch.ones(3), 0, "a test")
        comm.all_reduce(torch.ones(1))
        comm.all_reduce(torch.ones(1), prof=True, log_name="mine")
        found.append(totals(record.rows)[0])
    return found


def test_operations_are_selected_by_name() -> None:
    everything = {"gather": 1, "broadcast": 1, "all_reduce": 1, "mine": 1}
    assert run_ranks(2, selected)[0] == [{"mine": 1}, {"gather": 1, "mine": 1}, everything]


def first_caller(ranks: Communicator) -> None:
    gather(ranks)


def second_caller(ranks: Communicator) -> None:
    ranks.gather_words(torch.ones(2, dtype=torch.int64))


def callers() -> set[str]:
    record = recorder(debug=True)
    first_caller(communicator())
    second_caller(communicator())
    return {row.key.caller for row in record.rows}


def test_debug_separates_calls_by_their_caller() -> None:
    assert run_ranks(1, callers)[0] == {f"{__name__}.gather", f"{__name__}.second_caller"}


def spoken() -> list[str]:
    with_handler, said = logging.getLogger("shoal"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    with_handler.addHandler(handler)
    with_handler.setLevel(logging.INFO)
    recorder()
    gather(communicator())
    comm.configure(enabled=True, verbose=True)
    gather(communicator())
    return said


def test_verbose_logs_each_collective_on_the_first_rank() -> None:
    first, second = run_ranks(2, spoken)
    assert second == [] and len(first) == 1
    assert first[0].startswith("gather of unit 'blocks.0': all_gather of 800 bytes over 2 ranks in ")


# Lateness


def one_is_late(late: int, calls: int) -> tuple[dict[int, Any], dict[str, Any], list[CallStats]]:
    """The late rank launches after every other rank has reported its launch."""
    recorder()
    ranks = communicator(direct_bytes=1)
    word = torch.zeros(1)
    for _ in range(calls):
        buffer = torch.ones(10 * ranks.ranks)
        if ranks.rank == late:
            for other in range(ranks.ranks):
                if other != late:
                    dist.recv(word, other)
        handle = ranks.all_gather(buffer, GATHER)
        if ranks.rank != late:
            dist.send(word, late)
        handle.wait()
    with contextlib.redirect_stdout(io.StringIO()):
        found = comm.log_summary(show_straggler=True, return_dict=True)
        rows = comm.log_summary()
    return found["straggler_analysis"]["ranks"], found["straggler_analysis"]["ops"]["gather"], rows


@pytest.mark.parametrize("late", [0, 2])
def test_the_late_rank_is_named_on_every_rank(late: int) -> None:
    for ranks, ops, rows in run_ranks(3, one_is_late, late, 5):
        assert {rank: each["last"] for rank, each in ranks.items()} == {rank: 5 * (rank == late) for rank in range(3)}
        assert all(each["count"] == 5 for each in ranks.values())
        assert all(each["held_ms"] == 0 for rank, each in ranks.items() if rank != late)
        assert ranks[late]["stood_ms"] == 0 and ops[120]["count"] == 5
        assert [(row.calls, row.timed) for row in rows] == [(5, 5)]


# What is printed


def printed(destroy: bool) -> str:
    config = {"train_micro_batch_size_per_gpu": 2, "comms_logger": {}, "timeout": 20,
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = shoal.initialize(model=Wide(), config=config)[0]
    engine.backward(engine(torch.randn(2, 64)).pow(2).mean())
    engine.step()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if destroy:
            engine.destroy()
        else:
            comm.log_summary(show_straggler=True)
    return out.getvalue()


@pytest.mark.parametrize("destroy", [True, False])
def test_the_table_is_printed_by_the_first_rank_on_demand_and_at_the_end(destroy: bool) -> None:
    first, second = run_ranks(2, printed, destroy)
    assert second == ""
    for word in ("reduce_scatter", "replicate", "bytes sent", *(() if destroy else ("others waited",))):
        assert word in first
    assert ("others waited" in first) != destroy


def test_an_empty_summary_says_how_to_record(caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert comm.log_summary() == []
    assert 'give "comms_logger": {} in the configuration' in caplog.text


# The configuration


@pytest.mark.parametrize(("given", "on"), [
    ({}, False), ({"comms_logger": {}}, True), ({"comms_logger": {"verbose": True}}, True),
    ({"comms_logger": {"enabled": "auto"}}, True), ({"comms_logger": {"enabled": False}}, False),
    ({"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]}}, True),
])  # fmt: skip
def test_the_block_alone_switches_the_record_on(given: dict[str, Any], on: bool) -> None:
    config = Config.resolve({"train_batch_size": 1, **given}, data_ranks=1)
    assert config.comms_logger.enabled is on
    assert Config.resolve(config.as_dict(), data_ranks=1).comms_logger == config.comms_logger


def test_an_operation_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"comms_logger\.prof_ops\[0\]: got \"all_add\"; choose 'all_gather', 'reduce_"):
        Config.resolve({"train_batch_size": 1, "comms_logger": {"prof_ops": ["all_add"]}}, data_ranks=1)
    with pytest.raises(ConfigError, match=r"comms_logger\.prof_ops\[0\]: got \"all_add\""):
        comm.configure(prof_ops=["all_add"])
