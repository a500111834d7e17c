"""The training loop in its forms: accumulation, boundaries, several engines, evaluation, and `destroy`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.engine.engine import Engine
from shoal.errors import UsageError
from shoal.testing import run_ranks
from shoal.transport.collectives import traffic

from ..zero.models import Plain, batch, loss_of
from .trained import build, configured, loss, model, same, train, weights


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two runs differ only in the order of sums."""
    return all(torch.allclose(one[name], value, atol=1e-5, rtol=1e-4) for name, value in other.items())


def accumulate(stage: int) -> None:
    """Three ways to accumulate four microbatches: counted, within no_sync, and with boundaries that are set."""
    sgd = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    counted = build(stage, gradient_accumulation_steps=4, optimizer=sgd)
    unsynced, by_hand = (build(stage, gradient_accumulation_steps=4, optimizer=sgd) for _ in range(2))
    for step in range(3):
        for micro in range(4):
            counted.backward(loss(counted, step, micro))
            assert counted.is_gradient_accumulation_boundary() == (micro == 3)
            counted.step()
            assert counted.was_step_applied() == (micro == 3)
        before = traffic.calls["reduce"]
        with unsynced.no_sync():
            for micro in range(3):
                unsynced.backward(loss(unsynced, step, micro))
                unsynced.step()
        assert traffic.calls["reduce"] == before
        unsynced.backward(loss(unsynced, step, 3))
        unsynced.step()
        for micro in range(4):
            by_hand.set_gradient_accumulation_boundary(micro == 3)
            by_hand.backward(loss(by_hand, step, micro))
            by_hand.zero_grad() if micro < 3 else by_hand.step()  # nothing is lost before the boundary
    assert same(weights(counted), weights(by_hand)) and close(weights(counted), weights(unsynced))
    assert counted.global_steps == by_hand.global_steps == unsynced.global_steps == 3
    assert counted.global_samples == by_hand.global_samples == 3 * 4 * 2 * 2


@pytest.mark.parametrize("stage", range(4))
def test_no_sync_and_boundaries_set_by_hand_accumulate(stage: int) -> None:
    run_ranks(2, accumulate, stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_another_engines_gradients_can_be_discarded_by_hand(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate sets each boundary by hand, and its optimizer's `zero_grad` never reaches the engine."""
    warned: list[str] = []
    monkeypatch.setattr("shoal.engine.base.warn_once", warned.append)
    configuration = {"train_batch_size": 2, "zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW"}}
    judge, alone, maker = (shoal.initialize(model=nn.Linear(3, 3), config=configuration)[0] for _ in range(3))
    alone.load_module_state_dict(judge.consolidated_state_dict())
    x = torch.arange(6.0).reshape(2, 3)
    for _ in range(2):
        for engine in (judge, alone):
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(x).square().mean())
            engine.zero_grad()  # its own gradients are kept
            engine.step()
        maker.backward(judge(maker(x)).mean())
        maker.step()
        judge.zero_grad()
    assert same(weights(judge), weights(alone)) and not warned
    maker.backward(judge(maker(x)).mean())
    judge.backward(judge(x).square().mean())
    assert "the next step also takes the gradients that another engine's backward left here" in warned[0]


def test_calls_in_the_wrong_order_are_refused() -> None:
    engine = build(2)
    with pytest.raises(UsageError, match=r"rank 0: step\(\) without gradients; call engine\.backward\(loss\)"):
        engine.step()
    for value, what in ((torch.zeros(3, requires_grad=True), r"shape \(3,\) with a graph"),
                        (torch.zeros(()), r"shape \(\) without a graph")):
        with pytest.raises(UsageError, match=rf"backward: got a tensor of {what}; pass the scalar loss"):
            engine.backward(value)
    with engine.no_sync():
        with pytest.raises(UsageError, match="no_sync: nested in another no_sync of this engine"), engine.no_sync():
            pass
        engine.backward(loss(engine, 0))
        with pytest.raises(UsageError, match="step: called inside no_sync; leave it first"):
            engine.step()
    engine.step()
    assert engine.was_step_applied()


def unreduced() -> None:
    engine, reference = build(2), build(2)
    before = traffic.calls["reduce"]
    engine.backward(loss(engine, 0), allreduce_gradients=False, release_loss=True)
    assert traffic.calls["reduce"] == before
    engine.step()
    train(reference, 1)
    assert same(weights(engine), weights(reference))


def test_step_reduces_the_gradients_of_an_unreduced_backward() -> None:
    run_ranks(2, unreduced)


def zero_grad(stage: int) -> None:
    engine, reference = build(stage), build(stage)
    engine.backward(loss(engine, 7))
    engine.zero_grad()
    with pytest.raises(UsageError, match="without gradients"):
        engine.step()
    engine.micro_steps = 0
    assert train(engine, 2) == train(reference, 2)
    counted, other = build(stage, gradient_accumulation_steps=2), build(stage, gradient_accumulation_steps=2)
    for micro in range(4):  # the published loop: zero_grad before every microbatch keeps what is accumulated
        counted.zero_grad()
        counted.backward(loss(counted, 0, micro))
        counted.step()
        other.backward(loss(other, 0, micro))
        other.step()
    assert same(weights(counted), weights(other))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_zero_grad_discards_only_at_the_start_of_an_accumulation(stage: int) -> None:
    run_ranks(2, zero_grad, stage)


def plain_backward(stage: int) -> None:
    engine, reference = build(stage), build(stage)
    for step in range(3):
        loss(engine, step).backward()
        engine.step()
    train(reference, 3)
    assert same(weights(engine), weights(reference))


@pytest.mark.parametrize("stage", range(4))
def test_plain_loss_backward_equals_engine_backward(stage: int) -> None:
    run_ranks(2, plain_backward, stage)


def together(stages: tuple[int, int]) -> None:
    """One loss goes back through two engines."""
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    engines = [build(stage, optimizer=sgd, gradient_clipping=0) for stage in stages]
    twins = [model(), model()]
    optimizers = [torch.optim.SGD(twin.parameters(), lr=0.1) for twin in twins]

    for step in range(2):
        tokens, targets = batch(step, 0, dist.get_rank())
        value = loss_of(engines[0](tokens) + 0.5 * engines[1](tokens), targets)
        value.backward()
        for engine in engines:
            engine.step()
        for rank in range(2):
            tokens, targets = batch(step, 0, rank)
            (loss_of(twins[0](tokens) + 0.5 * twins[1](tokens), targets) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for engine, twin in zip(engines, twins, strict=True):
        assert close(weights(engine), dict(twin.named_parameters()))


@pytest.mark.parametrize("stages", [(0, 0), (1, 3), (3, 3)])
def test_one_loss_trains_two_engines(stages: tuple[int, int]) -> None:
    run_ranks(2, together, stages)


class Judge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean()


class Maker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 12))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def gan(stage: int) -> None:
    torch.manual_seed(0)
    nets = [Maker(), Judge()]
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    maker, judge = (shoal.initialize(model=net, config=configured(stage, optimizer=sgd, gradient_clipping=0))[0]
                    for net in nets)
    torch.manual_seed(0)
    twins = [Maker(), Judge()]
    optimizers = [torch.optim.SGD(twin.parameters(), lr=0.1) for twin in twins]
    noise, real = torch.randn(3, 5), torch.randn(3, 12)  # the same on both ranks
    for _ in range(3):
        fake = maker(noise)
        judge.backward(judge(fake.detach()) - judge(real))
        judge.step()
        maker.backward(-judge(fake))
        maker.step()
        judge.zero_grad()
        fake = twins[0](noise)
        (twins[1](fake.detach()) - twins[1](real)).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        (-twins[1](fake)).backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    for engine, twin in zip((maker, judge), twins, strict=True):
        assert close(weights(engine), dict(twin.named_parameters()))


@pytest.mark.parametrize("stage", range(4))
def test_a_generator_and_a_discriminator_train_in_turns(stage: int) -> None:
    run_ranks(2, gan, stage)


class Dropping(Plain):
    def hidden(self, tokens: Tensor) -> Tensor:
        return nn.functional.dropout(super().hidden(tokens), 0.5, self.training)


def evaluate(stage: int) -> None:
    """Evaluation between, and within, training steps changes nothing."""
    torch.manual_seed(1)
    engine = shoal.initialize(model=Dropping(), config=configured(stage, gradient_accumulation_steps=2))[0]
    torch.manual_seed(1)
    reference = shoal.initialize(model=Dropping(), config=configured(stage, gradient_accumulation_steps=2))[0]
    tokens, _ = batch(9, 0, 0)
    for step in range(2):
        for micro in range(2):
            torch.manual_seed(step)
            engine.backward(loss(engine, step, micro))
            for context in (torch.no_grad(), torch.inference_mode()):
                engine.eval()
                with context:
                    first = engine(tokens)
                    assert torch.equal(first, engine(tokens)) and not first.requires_grad
                engine.train()
            engine.eval()
            assert engine(tokens).requires_grad  # a forward with gradients that no backward follows
            engine.train()
            engine.step()
            torch.manual_seed(step)
            reference.backward(loss(reference, step, micro))
            reference.step()
    assert same(weights(engine), weights(reference))


@pytest.mark.host("the late device knows no inference mode")
@pytest.mark.parametrize("stage", range(4))
def test_evaluation_does_not_change_training(stage: int) -> None:
    run_ranks(2, evaluate, stage)


def destroy(stage: int) -> None:
    engine = build(stage, "tied")
    train(engine, 2)
    expected = weights(engine)
    net: Any = engine.module
    engine.destroy()
    del engine
    assert type(net.embed.weight) is nn.Parameter and net.head.weight is net.embed.weight
    assert same(expected, dict(net.named_parameters()))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    before = traffic.bytes_sent
    tokens, targets = batch(5, 0, dist.get_rank())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss_of(net(tokens), targets).backward()
    optimizer.step()
    assert all(p.grad is not None for p in net.parameters()) and traffic.bytes_sent == before
    net.load_state_dict(expected | {"head.weight": expected["embed.weight"]})
    again = shoal.initialize(model=net, config=configured((stage + 1) % 4))[0]
    assert same(expected, weights(again))
    train(again, 2)


@pytest.mark.parametrize("stage", range(4))
def test_destroy_leaves_a_plain_model(stage: int) -> None:
    run_ranks(2, destroy, stage)


def trainer(stage: int) -> None:
    """The order of calls of the Hugging Face Trainer with accelerate."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    config = configured(stage, gradient_accumulation_steps=2, steps_per_print=float("inf"), bf16={"enabled": False},
                        zero_allow_untested_optimizer=True, fp16={"enabled": False})
    del config["optimizer"]
    engine, _, _, scheduler = shoal.initialize(model=net, optimizer=optimizer, lr_scheduler=schedule, config_params=config)
    assert scheduler is schedule and isinstance(engine, shoal.Engine)
    engine.zero_grad()
    norms: list[float | None] = []
    for step in range(3):
        for micro in range(2):
            engine.train()
            value = loss(engine, step, micro)
            engine.set_gradient_accumulation_boundary(is_boundary=micro == 1)
            engine.backward(value / 2, scale_wrt_gas=False)
            if micro == 1:
                engine.step()
                norms.append(engine.get_global_grad_norm())
                assert engine.optimizer is not None and not engine.optimizer.overflow
                engine.zero_grad()
    reference = build(stage, gradient_accumulation_steps=2)
    reference.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(reference.basic_optimizer, lambda step: 1 / (step + 1))
    train(reference, 3)
    assert close(weights(engine), weights(reference)) and all(norm and norm > 0 for norm in norms)
    assert engine.global_steps == 3 and engine.get_lr() == [pytest.approx(1e-2 / 4)]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("stage", [2, 3])
def test_the_call_order_of_the_hugging_face_trainer_trains_the_same(stage: int) -> None:
    run_ranks(2, trainer, stage)


def counted(engine: Engine) -> tuple[int, int, int]:
    return engine.global_steps, engine.micro_steps, engine.global_samples


def test_counters_count_steps_microbatches_and_samples() -> None:
    engine = build(gradient_accumulation_steps=3)
    assert counted(engine) == (0, 0, 0)
    train(engine, 2)
    assert counted(engine) == (2, 6, 12)
    engine.global_steps = 10
    train(engine, 1)
    assert engine.global_steps == 11


def test_backward_returns_the_divided_loss_and_honours_retain_graph() -> None:
    engine = build(gradient_accumulation_steps=4)
    value = loss(engine, 0)
    assert engine.backward(value, retain_graph=True).item() == pytest.approx(value.item() / 4)
    assert engine.backward(value, scale_wrt_gas=False).item() == value.item()
    assert not engine.is_gradient_accumulation_boundary()


def one_loss_over_two(first: dict[str, Any], second: dict[str, Any]) -> None:
    engines = [shoal.initialize(model=nn.Linear(4, 4), config={
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **extra})[0]
        for extra in (first, second)]
    dtype = next(engines[0].module.parameters()).dtype
    loss = engines[1](engines[0](torch.ones(2, 4, dtype=dtype))).float().square().mean()
    engines[0].backward(loss)
    for engine in engines:
        engine.step()


def differing_engines() -> None:
    static = {"fp16": {"enabled": True, "loss_scale": 64}}
    one_loss_over_two(static, static)
    one_loss_over_two({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 2})
    with pytest.raises(UsageError, match=r"two engines that scale it differently(.|\n)*by 0\.5, this one by 1;"):
        one_loss_over_two({"gradient_accumulation_steps": 2}, {})


def test_one_loss_through_two_engines_needs_one_scale() -> None:
    run_ranks(1, differing_engines)
