"""The pipeline engine: its inputs and outputs, the calls that it refuses, and failures that reach every rank."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.errors import CollectiveFailed, PipelineError, ShoalError, UsageError
from shoal.pipeline.links import Links
from shoal.testing import run_ranks
from shoal.transport.collectives import traffic
from shoal.zero.reducer import Reducer

from .small import BLOCKS, COUNT, MICRO, STEPS, WIDTH, WORDS, Block, Case, Embed, data, loss_fn, microbatch

LONG = 600
"""Seconds of a timeout that no test waits for; `run_ranks` fails the test long before."""


def engine_of(layers: list[Any], *, loss: Callable[..., Any] | None = loss_fn, stages: int = 2, **config: Any) -> Any:
    module = shoal.PipelineModule(layers, num_stages=stages, loss_fn=loss, partition_method="uniform", seed_layers=True)
    return shoal.initialize(model=module, config={**Case().settings, **config})[0]


def error_of(call: Callable[[], object]) -> str:
    """Return the message of the error that `call` raises."""
    with pytest.raises(ShoalError) as found:
        call()
    return str(found.value)


# Values between stages


class Start(nn.Module):
    """Returns a dict of tensors, a number and a nested tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Embed()

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        x = self.inner(tokens)
        return {"x": x, "mask": tokens > 3, "scale": float(tokens.shape[1]), "more": (x * 2, [None, "text"])}


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, value: dict[str, Any]) -> Tensor:
        assert value["more"][1] == [None, "text"] and value["mask"].dtype == torch.bool
        return self.out(value["x"] * value["mask"][..., None] + value["more"][0] / value["scale"])


def losses_with_changing_shapes(stages: int) -> list[float]:
    engine = engine_of([shoal.LayerSpec(Start), shoal.LayerSpec(End)], stages=stages)
    found = []
    for step in range(STEPS):
        batches = [microbatch(step, number, 0, length=3 + number) for number in range(COUNT)]
        found.append(engine.train_batch(iter(batches)).item())
    return found


class Seen(Block):
    """Keeps weak references to its inputs."""

    given: ClassVar[list[weakref.ref[Tensor]]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.given.append(weakref.ref(x))
        return super().forward(x)


def order_of_sends(schedule: str) -> list[str]:
    """Return the sends and the ends of backward passes of this rank in one step, in order."""
    events: list[str] = []
    send, finish = Links.send, Reducer.finish

    def sending(links: Links, kind: str, stage: int, value: object) -> None:
        events.append(kind)
        send(links, kind, stage, value)

    def finishing(reducer: Reducer) -> None:
        events.append("reduced" if reducer._due else "kept")  # pyright: ignore[reportPrivateUsage]
        finish(reducer)

    Links.send, Reducer.finish = sending, finishing
    layers = [shoal.LayerSpec(Embed), shoal.LayerSpec(Seen), shoal.LayerSpec(nn.Linear, WIDTH, WORDS)]
    engine = engine_of(layers, pipeline={"schedule": schedule})
    gc.collect()
    gc.disable()
    engine.train_batch(data(0, 0))
    assert not any(ref() is not None for ref in Seen.given), "inputs are released without the garbage collector"
    gc.enable()
    return events


def test_input_gradients_are_sent_before_the_last_pass_reduces() -> None:
    assert run_ranks(2, order_of_sends, "1f1b")[1] == ["kept", "gradients"] * (COUNT - 1) + ["gradients", "reduced"]
    split = run_ranks(2, order_of_sends, "zb-h1")[1]
    assert split.count("gradients") == COUNT
    assert split.count("reduced") == 1
    assert split[-1] == "reduced"


def test_stages_exchange_any_value_of_changing_shape() -> None:
    expected = run_ranks(1, losses_with_changing_shapes, 1)[0]
    assert run_ranks(2, losses_with_changing_shapes, 2)[0] == pytest.approx(expected, rel=1e-6)


def evaluated(case: Case) -> list[Any]:
    engine = shoal.initialize(model=case.module(), config=case.settings)[0]
    first, *_, last = (module for module in engine.module.children() if not isinstance(module, nn.ModuleDict))
    first.shared = last.shared = nn.Dropout()  # the last has it after the first, in another mode
    first.eval()
    modes = [module.training for module in engine.module.modules()]
    odd = [tuple(part[:1] for part in microbatch(9, number, 0, length=5)) for number in range(3)]
    loss, logits = engine.eval_batch(iter(odd), return_logits=True, num_micro_batches=3)
    losses = engine.eval_batch(iter(odd), reduce_output=None, num_micro_batches=3)
    only, outputs = engine.eval_batch(iter(odd), return_logits=True, compute_loss=False, num_micro_batches=3)
    quiet = engine.eval_batch(iter(odd), bcast_loss=False, num_micro_batches=3)
    assert [module.training for module in engine.module.modules()] == modes
    trained = engine.train_batch(data(0, 0)).item()
    shape = None if logits is None else tuple(logits.shape)
    same = outputs is None or torch.equal(outputs, logits)
    return [loss.item(), [value.item() for value in losses], shape, only, same, quiet is None, trained]


def test_evaluation_takes_microbatches_of_any_size_and_number() -> None:
    alone = run_ranks(1, evaluated, Case(stages=1))[0]
    for case in (Case(stages=2, zero=3), Case(stages=2, schedule="zbv", stages_per_rank=2)):
        found = run_ranks(2, evaluated, case)
        for rank, (loss, losses, shape, only, same, quiet, trained) in enumerate(found):
            last = rank == (0 if case.schedule == "zbv" else 1)
            assert loss == pytest.approx(alone[0], rel=1e-6) and losses == pytest.approx(alone[1], rel=1e-6)
            assert shape == ((3, 4, WORDS) if last else None) and only is None and same
            assert quiet == (not last) and trained == pytest.approx(alone[-1], rel=1e-6)


def bytes_of_a_step(case: Case) -> dict[str, int]:
    engine = shoal.initialize(model=case.module(), config=case.settings)[0]
    engine.train_batch(data(0, 0))
    traffic.bytes.clear()
    engine.train_batch(data(1, 0))
    return dict(traffic.bytes)


@pytest.mark.host("a device's backend sends a header with each message")
def test_a_step_sends_only_activations_and_gradients_once() -> None:
    activation = MICRO * 5 * WIDTH * 4  # its form is predicted, and it is small: no header
    plain = Case(stages=2, tied=False)
    for case, edges in ((plain, 1), (replace(plain, schedule="interleaved", stages_per_rank=2), 3)):
        assert edges == 2 * (case.stages * case.stages_per_rank - 1) / case.stages
        for sent in run_ranks(2, bytes_of_a_step, case):
            assert sent["pipeline"] == edges * COUNT * activation
            assert {kind for kind, size in sent.items() if size} == {"pipeline", "words"}


# Refusals


def refusals() -> list[str]:
    engine = shoal.initialize(model=Case(stages=2).module(), config=Case().settings)[0]
    messages = [error_of(call) for call in (lambda: engine(torch.zeros(1)), lambda: engine.backward(torch.zeros(1)),
                                            engine.step)]
    with torch.no_grad():
        messages.append(error_of(lambda: engine.train_batch(data(0, 0))))
    messages.append(error_of(lambda: engine.eval_batch(data(0, 0), reduce_output="sum")))
    settings = Case().settings
    del settings["optimizer"]
    unoptimized = shoal.initialize(model=Case(stages=2).module(), config=settings)[0]
    messages.append(error_of(lambda: unoptimized.train_batch(data(0, 0))))
    for config in ({"pipeline": {"stages": 1}}, {"pipeline": {"schedule": "ZBV"}}, {"pipeline": {"schedule": "2f2b"}}):
        messages.append(error_of(lambda config=config: shoal.initialize(model=Case(stages=2).module(),
                                                                        config={**Case().settings, **config})))
    return messages


def test_calls_that_a_pipeline_does_not_support_are_refused() -> None:
    for text, words in zip(run_ranks(2, refusals)[1], (
        "forward: a pipeline runs whole steps; call engine.train_batch(data_iter), or engine.eval_batch",
        "backward: a pipeline runs whole steps; call engine.train_batch(data_iter)",
        "step: a pipeline steps at the end of engine.train_batch(data_iter)",
        "train_batch: gradients are disabled; call it outside of torch.no_grad(), or call eval_batch",
        "eval_batch: reduce_output: got 'sum'; choose 'avg' or None",
        "train_batch: the engine has no optimizer; give initialize one, or name one in the configuration",
        "initialize: the pipeline axis has 1 ranks by pipeline.stages and 2 by PipelineModule; give both the same, or leave",
        "pass schedule='zbv' to PipelineModule", "2f2b",
    ), strict=True):
        assert words in text


# Failures


class FailsAtThird(Block):
    """Fails at its third forward."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("out of luck")
        return super().forward(x)


def broken(kind: str) -> tuple[str, str]:
    middle = FailsAtThird if kind == "layer" else Block
    layers = [shoal.LayerSpec(Embed), *(shoal.LayerSpec(Block) for _ in range(BLOCKS - 2)), shoal.LayerSpec(middle),
              shoal.LayerSpec(Output)]
    engine = engine_of(layers, stages=3, loss=(lambda out, labels: out) if kind == "loss" else loss_fn, timeout=LONG)
    first = error_of(lambda: engine.train_batch(data(0, 0)))
    second = error_of(lambda: engine.train_batch(data(0, 0)))
    return first, second


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


@pytest.mark.parametrize(("kind", "words"), [
    ("layer", "failed: ValueError: out of luck"),
    ("loss", "the last stage gave a tensor of shape (2, 5, 17) as loss; loss_fn must return a scalar"),
])
def test_a_failure_ends_the_step_of_every_rank_before_the_timeout(kind: str, words: str) -> None:
    for rank, (first, second) in enumerate(run_ranks(3, broken, kind)):
        assert words in first, rank
        assert "an earlier step failed" in second and words in second


def test_the_error_shows_the_grid_with_the_failed_instruction() -> None:
    found = [first for first, _ in run_ranks(3, broken, "layer")]
    assert any("^ 1F2" in text or "^ 2F2" in text for text in found)
    assert len({text.partition(" failed")[0] for text in found}) == 1  # each rank names the rank that failed


def one_rank_exits() -> str:
    engine = shoal.initialize(model=Case(stages=2).module(), config={**Case().settings, "timeout": LONG})[0]
    engine.train_batch(data(0, 0))
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises((PipelineError, CollectiveFailed)) as found:
        engine.train_batch(data(1, 0))
    raise UsageError(f"raised: {found.value}")


def test_a_rank_that_dies_ends_the_step_of_the_others() -> None:
    with pytest.raises(AssertionError, match=r"rank [01]"):
        run_ranks(2, one_rank_exits)


class Explodes(Block):
    """Has gradients that overflow fp16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 6e4


def overflowing() -> list[Any]:
    layers = [shoal.LayerSpec(Embed), shoal.LayerSpec(Block), shoal.LayerSpec(Explodes), shoal.LayerSpec(Output)]
    engine = engine_of(layers, fp16={"enabled": True, "initial_scale_power": 14}, gradient_clipping=0.0)
    engine.train_batch(data(0, 0))
    return [engine.was_step_applied(), engine.skipped_steps, engine.loss_scale()]


def test_an_overflow_at_one_stage_skips_the_step_on_all() -> None:
    found = run_ranks(2, overflowing)
    assert found[0] == found[1] and found[0][:2] == [False, 1]


def loaders() -> list[float]:
    samples = [tuple(part[0] for part in microbatch(0, number, 0)) for number in range(64)]
    case = replace(Case(stages=2), config={"dataloader_drop_last": True})
    engine, _, loader, _ = shoal.initialize(model=case.module(), config=case.settings, training_data=samples)
    assert len(loader) == 64 // (MICRO * engine.dp_world_size)
    return [engine.train_batch().item() for _ in range(12)]


def test_training_data_repeats_after_its_end() -> None:
    losses = run_ranks(4, loaders)
    assert losses[0] == losses[3] and losses[0][-1] < losses[0][0]


def handlers_installed(count: int) -> list[int]:
    """Return how often a step, and an evaluation, of `count` microbatches install a handler of Ctrl-C."""
    engine = engine_of([shoal.LayerSpec(Embed), shoal.LayerSpec(Block), shoal.LayerSpec(Output)],
                       gradient_accumulation_steps=count)
    engine.train_batch(data(0, 0, count))
    found = []
    for call in (engine.train_batch, engine.eval_batch):
        with mock.patch.object(shoal.interrupts, "_set_handler", wraps=signal.signal) as install:
            call(data(1, 0, count))
        found.append(install.call_count)
    return found


def test_more_microbatches_do_not_install_the_handler_more_often() -> None:
    assert run_ranks(2, handlers_installed, 2) == run_ranks(2, handlers_installed, 6)
