"""What an engine has under way when a script drops it does not stop later messages between the same ranks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shoal
from shoal.testing import run_ranks
from shoal.transport import collectives
from shoal.transport.collectives import Communicator, Label

LABEL = Label(kind="gather", unit="dropped", index=0)
CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "timeout": 20,
          "zero_optimization": {"stage": 3}, "direct_bytes": None}


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def drop_a_gather() -> list[object]:
    communicator = Communicator(dist.group.WORLD, timeout=20)
    if dist.get_rank() == 0:
        store().get("dropped")  # the other rank's receive is gone when this rank sends
    full = torch.full((64,), float(dist.get_rank()))
    handle = communicator.all_gather(full, LABEL)
    del handle, full
    store().set("dropped", "")
    said = communicator.gather_objects(dist.get_rank())
    again = Communicator(dist.group.WORLD, timeout=20)
    assert not collectives._dropped.get(dist.group.WORLD)
    return [said, again.gather_objects("again")]


def test_later_messages_arrive_although_a_gather_was_dropped() -> None:
    assert run_ranks(2, drop_a_gather) == [[[0, 1], ["again"] * 2]] * 2


def drop_an_engine() -> int:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    engine: Any = shoal.initialize(model=model, config=CONFIG)[0]
    engine.backward(engine(torch.ones(1, 8)).sum())
    if dist.get_rank() == 0:
        run_ahead = engine.sharded.run_ahead
        engine.sharded.run_ahead = lambda: (store().get("dropped"), run_ahead())
        engine.step()
    else:
        engine.step()  # it gathers what the next forward uses first
        alive = weakref.ref(engine)
        del model, engine
        gc.collect()
        assert alive() is None and collectives._dropped[dist.group.WORLD]
        store().set("dropped", "")
    return len(shoal.initialize(model=nn.Linear(2, 2), config=CONFIG))


def test_an_engine_that_is_dropped_after_a_step_stops_no_later_one() -> None:
    assert run_ranks(2, drop_an_engine) == [4, 4]
