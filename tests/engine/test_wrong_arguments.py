"""A wrong argument of a call of the engine raises an error of the library: what was given, and what to give instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.engine.engine import Engine
from shoal.errors import UsageError

from .trained import build, configured, model, same, train, weights

CALLS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a half microbatch": (lambda engine: engine.set_train_micro_batch_size(2.5),
                          "set_train_micro_batch_size: got 2.5; it must be 1 or more, a whole number"),
    "a microbatch of True": (lambda engine: engine.set_train_micro_batch_size(True),
                             "set_train_micro_batch_size: got True; it must be 1 or more, a whole number"),
    "a batch as text": (lambda engine: engine.set_train_batch_size("8"),
                        r"set_train_batch_size: got '8'; it must be a multiple of 2 \(microbatches of 2 on 1 data ranks\)"),
    "a boundary as text": (lambda engine: engine.set_gradient_accumulation_boundary("x"),
                           "set_gradient_accumulation_boundary: got 'x'; give True or False"),
    "a loss as a number": (lambda engine: engine.backward(1.0), "backward: got a float; pass the scalar loss tensor"),
    "a dtype as text": (lambda engine: engine.consolidated_state_dict("fp32"),
                        "consolidated_state_dict: dtype: got 'fp32'; give a floating-point torch.dtype"),
    "a dtype of integers": (lambda engine: engine.consolidated_state_dict(torch.int8), "got torch.int8; give a floating"),
    "no state dict": (lambda engine: engine.load_module_state_dict(None),
                      "load_module_state_dict: got a NoneType; give every rank the state dict, a mapping of names to"),
    "a state dict of numbers": (lambda engine: engine.load_module_state_dict({"embed.weight": 1}, strict=False),
                                "load_module_state_dict: embed.weight: got a int, the model has"),
    "client state as a list": (lambda engine: engine.save_checkpoint("unused", client_state=[1]),
                               "save_checkpoint: client_state: got a list; give a mapping of names to values"),
    "gathered numbers": (lambda engine: shoal.gathered([1]).__enter__(),  # type: ignore[list-item]
                         "gathered: got 1; give a parameter, a module, or an iterable of parameters"),
}
"""A call, and the beginning of its error."""


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build(3)


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_argument_is_named_and_changes_nothing(engine: Engine, case: str) -> None:
    call, text = CALLS[case]
    before, batch = weights(engine), engine.get_batch_info()
    with pytest.raises(UsageError, match=text):
        call(engine)
    assert engine.get_batch_info() == batch
    train(engine, 1)
    assert not same(weights(engine), before)  # it trains on


def test_numpy_integers_are_whole_numbers(engine: Engine) -> None:
    numpy = pytest.importorskip("numpy")
    engine.set_train_micro_batch_size(numpy.int64(2))
    engine.set_train_batch_size(numpy.int64(4))
    assert engine.get_batch_info() == (4, 2, 2)
    engine.set_train_batch_size(2)


def test_a_destroyed_engine_refuses_other_batches() -> None:
    engine = build()
    engine.destroy()
    for call in (engine.set_train_micro_batch_size, engine.set_train_batch_size, engine.set_gradient_accumulation_boundary):
        with pytest.raises(UsageError, match=f"{call.__name__}: this engine was destroyed"):
            call(True)


@pytest.mark.parametrize(("parameters", "text"), [
    ("abc", "initialize: model_parameters: got a str; give model.parameters"),
    (nn.Linear(2, 2), "initialize: model_parameters: got a Linear; give model.parameters"),
    ([1], "optimizer group 0: got 1, which is no parameter of the model"),
    ([{"lr": 0.1}], r"optimizer group 0: got keys \['lr'\]; a group is a mapping with 'params'"),
    ([{"params": []}, 3], "optimizer group 1: got a int; a group is a mapping with 'params'"),
], ids=["text", "module", "numbers", "a group without params", "a group that is none"])  # fmt: skip
def test_model_parameters_that_are_none_are_refused(parameters: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        shoal.initialize(model=model(), model_parameters=parameters, config=configured())


class MetaBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("scale", torch.ones(2, device="meta"), persistent=False)


@pytest.mark.parametrize(("build_model", "text"), [
    (lambda: nn.Linear(2, 2, device="meta"), "of the Linear on the meta device have no values: 'weight' and 1 more; build"),
    (MetaBuffer, r"on the meta device have no values: 'scale'; build .*zero\.Init\(\) .*to_empty"),
], ids=["parameters", "buffer"])  # fmt: skip
def test_a_model_on_the_meta_device_is_refused(build_model: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        shoal.initialize(model=build_model(), config=configured())
