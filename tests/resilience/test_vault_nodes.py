"""Copies in memory over several nodes: what a lost node, a new one, fewer nodes and damage leave of a training."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoal
from shoal.checkpoint import Nodes, SpreadSnapshot
from shoal.errors import CheckpointError
from shoal.recording.page import PAGES
from shoal.resilience import vault
from shoal.resilience.guard import Guard
from shoal.resilience.settings import GuardSettings
from shoal.testing import RankFailed, run_ranks
from shoal.transport.collectives import Communicator

BATCH, EVERY = 12, 2
A, B, C = "a", "b", "c"


@pytest.mark.parametrize("names", [[A, A, B, B], [A, B, C], [A, A, A, B, C, C], [A, B, A, B], [B] * 3])
def test_each_rank_has_a_keeper_on_another_node(names: list[str]) -> None:
    nodes = Nodes.named(names)
    first = [names.index(name) for name in dict.fromkeys(names)]
    assert [rank for rank in range(len(names)) if nodes.is_first(rank)] == first
    for rank in range(len(names)):
        partner = nodes.partner(rank)
        assert partner is None if nodes.count == 1 else partner is not None and names[partner] != names[rank]
    by_keeper = {names[partner] for rank in range(len(names)) if (partner := nodes.partner(rank)) is not None}
    assert by_keeper == (set(names) if nodes.count > 1 else set())


def train(root: str, names: list[str], stop: int, stage: int = 3, mesh: dict[str, int] | None = None, dropout: float = 0.1,
          ) -> dict[str, Any]:
    """Run one rank of an attempt, on the node of its name: load what there is, train to step `stop`."""
    memory = Path(root, names[dist.get_rank()])
    memory.mkdir(parents=True, exist_ok=True)
    os.environ[PAGES] = str(memory)
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_batch_size": BATCH, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}, "timeout": 20,
        "zero_optimization": {"stage": stage}, "resilience": {"vault": {"every": EVERY}}, **({"mesh": mesh} if mesh else {})}
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.Linear(8, 8), nn.Linear(8, 1))
    messages: list[str] = []
    logging.getLogger("shoal").addHandler(handler := logging.Handler())
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("shoal").setLevel(logging.INFO)
    rows = torch.randn(60 * BATCH, 8, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True), torch.arange(len(rows)))
    engine, _, loader, _ = shoal.initialize(model=model, training_data=data, config=config)
    engine.load_checkpoint(f"{root}/disk")
    first = engine.global_steps
    with shoal.gathered(engine.module):
        loaded = [p.detach().flatten().tolist() for p in engine.module.parameters()]
    samples: dict[int, list[int]] = {}
    losses: dict[int, float] = {}
    assert loader is not None
    for inputs, targets, numbers in loader:
        if engine.global_steps == stop:
            break
        loss = (engine(inputs) - targets).square().mean()
        engine.backward(loss)
        engine.step()
        samples[engine.global_steps], losses[engine.global_steps] = numbers.tolist(), float(loss.detach())
    engine.copy_due()
    engine.checkpointer.wait_for_copy()
    with shoal.gathered(engine.module):
        weights = [p.detach().flatten().tolist() for p in engine.module.parameters()]
    return {"first": first, "loaded": loaded, "weights": weights, "messages": messages, "samples": samples, "losses": losses}


def attempt(root: Path, names: list[str], stop: int, **options: Any) -> list[dict[str, Any]]:
    return run_ranks(len(names), train, str(root), names, stop, **options)


def lose(root: Path, *names: str) -> None:
    for name in names:
        shutil.rmtree(root / name)


def files(root: Path, name: str, step: int) -> list[Path]:
    return sorted((root / name / "vault0" / f"step{step}").glob("*.safetensors"))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_new_node_continues_with_the_same_bits(tmp_path: Path, stage: int) -> None:
    names = [A, A, B, B]
    undisturbed = attempt(tmp_path / "undisturbed", names, 9, stage=stage)
    attempt(tmp_path / "lost", names, 5, stage=stage)
    for lost in (A, B):
        root = tmp_path / f"lost {lost}"
        shutil.copytree(tmp_path / "lost", root)
        lose(root, lost)
        again = attempt(root, names, 9, stage=stage)
        assert [each["first"] for each in again] == [4] * 4
        assert [each["weights"] for each in again] == [each["weights"] for each in undisturbed]


def test_each_node_has_its_files_and_those_of_the_one_before_it(tmp_path: Path) -> None:
    (first, *_) = attempt(tmp_path, [A, B, C], EVERY)
    names = {node: {path.name.partition("-")[0] for path in files(tmp_path, node, EVERY)} for node in (A, B, C)}
    assert names == {A: {"rank00000", "rank00002"}, B: {"rank00000", "rank00001"}, C: {"rank00001", "rank00002"}}
    copies = [path.read_bytes() for node in (A, B) for path in files(tmp_path, node, EVERY) if "rank00000" in path.name]
    assert copies[0] == copies[1]
    assert any("each of the 3 nodes sends its" in message for message in first["messages"])


@pytest.mark.parametrize("left", [[A, C], [C, B], [B, A, A]], ids="".join)
def test_the_nodes_that_are_left_load_all_of_it(tmp_path: Path, left: list[str]) -> None:
    before = attempt(tmp_path, [A, B, C], 2 * EVERY)
    lose(tmp_path, *{A, B, C} - set(left))
    again = attempt(tmp_path, left, 3 * EVERY)
    assert {each["first"] for each in again} == {2 * EVERY}
    assert all(each["loaded"] == before[0]["weights"] for each in again)
    assert {len(files(tmp_path, name, 3 * EVERY)) > 0 for name in left} == {True}  # copies go on


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("left", [[A, C], [C], [B, A, A, C]], ids="".join)
def test_another_world_uses_each_sample_once_with_the_same_losses(tmp_path: Path, left: list[str], stage: int) -> None:
    def of_step(ranks: list[dict[str, Any]], step: int) -> tuple[list[int], float]:
        """Return the samples of a step, and the mean of their losses: each rank has equally many."""
        return (sorted(number for rank in ranks for number in rank["samples"][step]),
                sum(rank["losses"][step] for rank in ranks) / len(ranks))

    undisturbed = attempt(tmp_path / "undisturbed", [A, B, C], 9, stage=stage, dropout=0.0)
    before = attempt(tmp_path / "lost", [A, B, C], 5, stage=stage, dropout=0.0)
    lose(tmp_path / "lost", *({A, B, C} - set(left) if len(left) > 1 else {B}))
    if len(left) == 1:  # a second loss, of a node that is no neighbour's keeper any more
        before = attempt(tmp_path / "lost", [A, C], 7, stage=stage, dropout=0.0)
        assert {each["first"] for each in before} == {4}
        lose(tmp_path / "lost", A)
    again = attempt(tmp_path / "lost", left, 9, stage=stage, dropout=0.0)
    (first,) = {each["first"] for each in again}
    assert first == (6 if len(left) == 1 else 4)
    assert not (tmp_path / "lost" / "disk").exists()
    used: list[int] = []
    for step in range(1, 10):
        ranks = again if step > first else before if step in before[0]["samples"] else None
        samples, expected = of_step(undisturbed, step)
        if ranks is not None:
            found, loss = of_step(ranks, step)
            assert found == samples
            assert loss == pytest.approx(expected, rel=1e-5)
        used += samples
    assert len(used) == len(set(used)) == 9 * BATCH
    for one, other in zip(again[0]["weights"], undisturbed[0]["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-4, atol=1e-6)


def test_a_new_mesh_loads_what_another_one_left(tmp_path: Path) -> None:
    before = attempt(tmp_path, [A, A, B, B], EVERY, stage=2)
    lose(tmp_path, A)
    again = attempt(tmp_path, [C, C, B, B], 2 * EVERY, stage=3, mesh={"shard": 2})
    assert {each["first"] for each in again} == {EVERY}
    assert all(each["loaded"] == before[0]["weights"] for each in again)


def test_two_lost_neighbours_lose_the_copies(tmp_path: Path) -> None:
    attempt(tmp_path, [A, B, C], EVERY)
    lose(tmp_path, A, B)
    again = attempt(tmp_path, [A, B, C], 1)
    assert {each["first"] for each in again} == {0}
    assert sum("of step 2 in memory is not loaded: no node has rank" in message for message in again[0]["messages"]) == 1


def test_a_damaged_file_costs_one_generation(tmp_path: Path) -> None:
    attempt(tmp_path, [A, B], 2 * EVERY)
    for path in files(tmp_path, A, 2 * EVERY):
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    again = attempt(tmp_path, [A, B], 2 * EVERY)
    assert {each["first"] for each in again} == {EVERY}
    assert "the copy of step 4 in memory cannot be used, and is removed" in "".join(again[0]["messages"])


def test_a_copy_that_one_node_did_not_finish_is_not_loaded(tmp_path: Path) -> None:
    attempt(tmp_path, [A, B, C], 2 * EVERY)
    for node in (B, C):  # an attempt that ends between the publications of nodes leaves this
        shutil.rmtree(tmp_path / node / "vault0" / f"step{2 * EVERY}")
    again = attempt(tmp_path, [A, B, C], EVERY)
    assert {each["first"] for each in again} == {EVERY}
    assert "the copy of step 4 in memory is not loaded: no node has rank" in "".join(again[0]["messages"])
    assert "the copy of step 2 in memory is not loaded" not in "".join(again[0]["messages"])


def lose_a_rank_while_loading(root: str) -> str:
    """Load the copies on two nodes, of which the second ends on the way; return the error of the first."""
    if dist.get_rank() == 1:
        SpreadSnapshot._copy_all = lambda *args: os._exit(1)  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]
    try:
        train(root, [A, B], EVERY)
    except Exception as error:
        return type(error).__name__
    return "loaded"


def test_a_rank_that_ends_while_it_loads_costs_no_copy(tmp_path: Path) -> None:
    attempt(tmp_path, [A, B], 2 * EVERY)
    with pytest.raises(RankFailed):
        run_ranks(2, lose_a_rank_while_loading, str(tmp_path))
    assert {each["first"] for each in attempt(tmp_path, [A, B], 2 * EVERY)} == {2 * EVERY}


@pytest.mark.parametrize("text", ["", "null", "[1"])
def test_a_damaged_list_of_files_makes_its_node_no_holder(tmp_path: Path, text: str) -> None:
    attempt(tmp_path, [A, B], 2 * EVERY)
    (tmp_path / A / "vault0" / f"step{2 * EVERY}" / "here.json").write_text(text)
    assert {each["first"] for each in attempt(tmp_path, [A, B], 2 * EVERY)} == {2 * EVERY}  # the other node has both files


def test_copies_that_training_does_not_go_on_from_are_removed(tmp_path: Path) -> None:
    attempt(tmp_path, [A, B, C], 4 * EVERY)
    lose(tmp_path, A, B)
    assert {each["first"] for each in attempt(tmp_path, [A, B, C], EVERY)} == {0}
    assert [path.name for path in (tmp_path / C / "vault0").iterdir() if path.name.startswith("step")] == [f"step{EVERY}"]


def test_room_that_old_copies_take_is_room(tmp_path: Path) -> None:
    for stop in (2 * EVERY, 4 * EVERY):
        run_ranks(2, in_little_room, str(tmp_path), stop)


def in_little_room(root: str, stop: int) -> None:
    """Train on two nodes, each with room for its generations and no more."""
    folder = Path(root, [A, B][dist.get_rank()], "vault0")
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    vault.memory_left = lambda: 16_000 - held
    train(root, [A, B], stop)


def no_room(root: str) -> str:
    vault.memory_left = lambda: 1000 if dist.get_rank() == 1 else 1 << 40
    with pytest.raises(CheckpointError, match=r"copies need .* on this node") as caught:
        train(root, [A, B], EVERY)
    return str(caught.value)


def test_a_node_without_room_is_an_error_of_all_ranks(tmp_path: Path) -> None:
    for message in run_ranks(2, no_room, str(tmp_path)):
        assert "(2 generations, and the next)" in message


def write_and_read_the_record(root: str) -> list[int]:
    """Write the guard's record on both nodes, then remove it on the first: both ranks read the second's."""
    assert dist.group.WORLD is not None
    communicator = Communicator(dist.group.WORLD, timeout=20)
    path = Path(root, str(dist.get_rank())) / "record.json"
    path.parent.mkdir()
    guard = Guard(path, GuardSettings(enabled=True), communicator)
    guard._record.skips = 2  # pyright: ignore[reportPrivateUsage]
    guard._write()  # pyright: ignore[reportPrivateUsage]
    if dist.get_rank() == 0:
        path.unlink()
    dist.barrier()
    return [Guard(path, GuardSettings(enabled=True), communicator)._record.skips]  # pyright: ignore[reportPrivateUsage]


def test_the_guards_record_survives_a_node(tmp_path: Path) -> None:
    assert run_ranks(2, write_and_read_the_record, str(tmp_path)) == [[2], [2]]
