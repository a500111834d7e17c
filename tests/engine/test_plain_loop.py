"""The loop of plain PyTorch around an engine: `loss.backward()`, `p.grad`, `clip_grad_norm_`, the script's optimizer."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

import shoal
from shoal.errors import UsageError
from shoal.testing import run_ranks

Change = Callable[[nn.Module, Optimizer], object]
STEPS = 3


class Unused(nn.Sequential):
    """The last layer takes part in no forward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self)[:-1]:
            x = layer(x)
        return x


def model() -> nn.Module:
    torch.manual_seed(0)
    return Unused(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 3))


def sgd(whole: nn.Module) -> Optimizer:
    decayed = [p for p in whole.parameters() if p.dim() > 1]
    others = [p for p in whole.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=False)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "timeout": 20,
            "zero_optimization": {"stage": stage}, **more}


def clip_by_groups(whole: nn.Module, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        nn.utils.clip_grad_norm_(group["params"], 0.05)


def clamp_data(whole: nn.Module, optimizer: Optimizer) -> None:
    for p in whole.parameters():
        if p.grad is not None:
            p.grad.data.clamp_(-0.02, 0.02)


def replace(whole: nn.Module, optimizer: Optimizer) -> None:
    for p in whole.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5 + p.detach()
    whole[0].bias.grad = None
    whole[2].bias.grad.data = torch.ones(6)


def evaluate_between(whole: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad():
        whole(batch(9, 0))
    nn.utils.clip_grad_value_(whole.parameters(), 0.01)


CHANGES: dict[str, Change] = {
    "nothing": lambda whole, optimizer: None,
    "clip_grad_norm_": lambda whole, optimizer: nn.utils.clip_grad_norm_(whole.parameters(), 0.1),
    "clip by groups": clip_by_groups,
    "clamp data": clamp_data,
    "replace": replace,
    "evaluate between": evaluate_between,
}


def plain(change: Change, ranks: int) -> list[Tensor]:
    whole = model()
    optimizer = sgd(whole)
    schedule = StepLR(optimizer, 1, 0.5)
    for step in range(STEPS):
        replicas = [copy.deepcopy(whole) for _ in range(ranks)]
        for rank, replica in enumerate(replicas):
            replica(batch(step, rank)).square().mean().backward()
        for p, *addends in zip(whole.parameters(), *(replica.parameters() for replica in replicas), strict=True):
            found = [addend.grad for addend in addends if addend.grad is not None]
            p.grad = sum(found[1:], start=found[0]) / ranks if found else None
        change(whole, optimizer)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return [p.detach() for p in whole.parameters()]


def sharded(stage: int, rank: int, names: list[str], *, handed: bool) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for name in names:
        whole = model()
        given = sgd(whole)
        engine, returned, _, _ = shoal.initialize(model=whole, optimizer=given, config=config(stage))
        optimizer = given if handed else returned
        assert optimizer is not None and isinstance(given, torch.optim.SGD)
        schedule = StepLR(optimizer, 1, 0.5)
        for step in range(STEPS):
            (whole if handed else engine)(batch(step, rank)).square().mean().backward()
            CHANGES[name](whole, optimizer)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert engine.global_steps == STEPS and engine.get_lr() == pytest.approx([0.1 / 2**STEPS] * 2)
        assert stage > 0 or {type(p) for p in whole.parameters()} == {nn.Parameter}
        state = engine.consolidated_state_dict()
        found[name] = [] if state is None else list(state.values())
        engine.destroy()
        with pytest.raises(UsageError, match="this engine was destroyed"):
            given.step()
    return found


def all_stages() -> list[tuple[int, str, list[Tensor]]]:
    rank = torch.distributed.get_rank()
    found: list[tuple[int, str, list[Tensor]]] = []
    for stage in range(4):
        for handed in (True, False):  # the optimizer that was handed over, and the one that initialize returned
            names = list(CHANGES) if stage < 3 else ["nothing"]
            found += [(stage, name, values) for name, values in sharded(stage, rank, names, handed=handed).items()]
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loop_of_plain_torch_trains_the_same_weights(ranks: int) -> None:
    expected = {name: plain(change, ranks) for name, change in CHANGES.items()}
    for stage, name, values in run_ranks(ranks, all_stages)[0]:
        for value, other in zip(values, expected[name], strict=True):
            assert torch.equal(value, other), (stage, name)


def accumulated(stage: int) -> list[list[Tensor]]:
    """Accumulate two microbatches: counted by the configuration, and by the script."""
    found: list[list[Tensor]] = []
    for counted in (True, False):
        whole = model()
        optimizer = sgd(whole)
        engine = shoal.initialize(model=whole, optimizer=optimizer,
                                  config=config(stage, gradient_accumulation_steps=2 if counted else 1))[0]
        for micro in range(4):
            (engine(batch(micro, torch.distributed.get_rank())).square().mean() / 2).backward()
            if counted or micro % 2:
                optimizer.step()
                optimizer.zero_grad()
        assert engine.global_steps == 2
        found.append(list((engine.consolidated_state_dict() or {}).values()))
    engine.set_train_batch_size(8 * engine.dp_world_size)
    for micro in range(2):
        engine(batch(micro, 0)).sum().backward()
    with pytest.raises(UsageError, match=r"step: called after 2 backward passes, .* gradient_accumulation_steps 2"):
        optimizer.step()
    return found


def test_an_optimizer_steps_at_the_end_of_an_accumulation() -> None:
    for stage in range(4):
        counted, by_hand = run_ranks(2, accumulated, stage)[0]
        for one, other in zip(counted, by_hand, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def within_an_accumulation(ranks: int) -> None:
    expected: list[list[Tensor | None]] = []
    for rank in range(ranks):
        whole = model()
        whole(batch(0, rank)).square().mean().backward()
        expected.append([p.grad for p in whole.parameters()])
    for stage in range(3):
        whole = model()
        engine = shoal.initialize(model=whole, optimizer=sgd(whole), config=config(stage, gradient_accumulation_steps=2))[0]
        engine(batch(0, torch.distributed.get_rank())).square().mean().backward()
        if ranks > 1 and stage < 2:
            with pytest.raises(UsageError, match=r"before it was reduced .* engine\.allreduce_gradients\(\)"):
                _ = whole[0].weight.grad
            engine.allreduce_gradients()
        for p, *addends in zip(whole.parameters(), *expected, strict=True):
            addends = [addend for addend in addends if addend is not None]
            assert (p.grad is None) == (not addends)
            assert p.grad is None or torch.equal(p.grad, sum(addends[1:], start=addends[0]) / ranks), stage


@pytest.mark.parametrize("ranks", [1, 2])
def test_within_an_accumulation_grad_is_there_once_it_is_reduced(ranks: int) -> None:
    run_ranks(ranks, within_an_accumulation, ranks)


def scaled() -> list[float]:
    """A GradScaler around fp32 weights: its first step overflows."""
    losses: list[list[float]] = []
    for stage in (None, 0, 2):
        whole = model()
        optimizer: Optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1, fused=True)
        if stage is not None:
            shoal.initialize(model=whole, optimizer=optimizer, config=config(stage))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1)
        losses.append([])
        for step in range(4):
            optimizer.zero_grad()
            loss = whole(batch(step, 0)).square().mean()
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            losses[-1].append(loss.item())
    first, *others = losses
    assert first[0] != first[3] and all(other == pytest.approx(first, rel=1e-6) for other in others)
    return first


def test_a_grad_scaler_scales_unscales_and_skips_as_in_plain_torch() -> None:
    run_ranks(1, scaled)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stage 3": ({"zero_optimization": {"stage": 3}}, r"p\.grad of '0\.weight' is sharded at stage 3.*set gradient_clipping"),
    "fp16": ({"fp16": {"enabled": True, "loss_scale": 128}}, r"p\.grad of '0\.weight' is multiplied by the loss scale 128"),
}


def refused() -> None:
    for more, expected in REFUSED.values():
        for threshold in (0, 1000):  # whole parameters at stage 3 too
            whole = model()
            optimizer = sgd(whole)
            more = copy.deepcopy(more)
            if "zero_optimization" in more:
                more["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
            engine = shoal.initialize(model=whole, optimizer=optimizer, config=config(0, **more))[0]
            assert whole[0].weight.grad is None
            x = batch(0, 0).to(whole[0].weight.dtype)
            engine.backward(engine(x).square().mean())
            for parameters in (whole.parameters(), optimizer.param_groups[0]["params"]):
                with pytest.raises(UsageError, match=expected):
                    nn.utils.clip_grad_norm_(parameters, 1.0)
            with shoal.gathered(whole), pytest.raises(UsageError, match=expected):
                whole[0].weight.grad = torch.zeros(6, 5)
            optimizer.step()
            assert whole[0].weight.grad is None
            if "fp16" in more:
                with pytest.raises(UsageError, match="unscaled loss while the loss scale is 128"):
                    torch.amp.GradScaler("cpu").scale(engine(x).square().mean()).backward()


def test_gradients_that_cannot_be_read_say_what_to_call() -> None:
    run_ranks(1, refused)


def handed_over_again() -> None:
    whole = model()
    optimizer = sgd(whole)
    engine = shoal.initialize(model=whole, optimizer=optimizer, config=config(1))[0]
    assert optimizer.param_groups[0]["params"][0] is whole[0].weight
    with pytest.raises(UsageError, match=r"optimizer\.add_param_group"):
        optimizer.add_param_group({"params": []})
    loss = optimizer.step(lambda: engine.backward(engine(batch(0, 0)).square().mean()))
    assert loss is not None and engine.global_steps == 1
    engine.destroy()
    again = shoal.initialize(model=whole, optimizer=optimizer, config=config(0))[0]
    again(batch(0, 0)).square().mean().backward()
    optimizer.step()
    assert again.global_steps == 1


def test_an_optimizer_may_be_handed_to_the_next_engine() -> None:
    run_ranks(1, handed_over_again)


class Wrapped:
    """A client's wrapper, as LightningOptimizer: of the optimizer's class, and it forwards attributes that it lacks."""

    def __init__(self, optimizer: Optimizer):
        self._wrapped = optimizer
        self.__class__ = type("Wrapped", (Wrapped, type(optimizer)), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


def copied(stage: int) -> None:
    whole = model()
    optimizer = sgd(whole)
    engine = shoal.initialize(model=whole, optimizer=optimizer, config=config(stage))[0]
    wrapped: Any = Wrapped(optimizer)
    for number, other in enumerate((copy.copy(optimizer), wrapped)):
        whole(batch(number, 0)).square().mean().backward()
        other.step()
        other.zero_grad()
        assert engine.global_steps == number + 1
        assert other.param_groups is optimizer.param_groups
    optimizer.state.clear()
    assert len(other.state) == len(optimizer.state) == 0
    with pytest.raises(UsageError, match=r"can be neither pickled nor deeply copied; take optimizer\.state_dict\(\)"):
        copy.deepcopy(optimizer)


@pytest.mark.parametrize("stage", [0, 2])
def test_copies_and_wrappers_of_the_handed_optimizer_reach_the_engine(stage: int) -> None:
    run_ranks(1, copied, stage)


def hooked(optimizer: Optimizer, whole: nn.Module, calls: list[str], *, clips: bool) -> None:
    """Register a hook of each kind; the one before a step clips by the norm of all gradients, where they can be read."""
    def before(given: Optimizer, args: Any, kwargs: Any) -> None:
        calls.append("pre")
        if clips:
            nn.utils.clip_grad_norm_((p for group in given.param_groups for p in group["params"]), 0.05)

    def named(given: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("saved")
        return {**state, "note": len(state["param_groups"])}

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda given, args, kwargs: calls.append(f"post of {type(given).__name__}"))
    optimizer.register_state_dict_pre_hook(lambda given: calls.append("saving"))
    optimizer.register_state_dict_post_hook(named)
    optimizer.register_load_state_dict_pre_hook(lambda given, state: calls.append(f"loading {state.pop('note')}"))
    optimizer.register_load_state_dict_post_hook(lambda given: calls.append("loaded"))


def hooks_of_a_loop(stage: int | None, *, late: bool = False) -> tuple[list[str], list[Tensor]]:
    """Train with hooks registered before `initialize`, or after it; `stage` None: in plain PyTorch."""
    whole, calls = model(), list[str]()
    optimizer = sgd(whole)
    steps = optimizer.step
    if not late:
        hooked(optimizer, whole, calls, clips=stage != 3)
    if stage is not None:
        engine = shoal.initialize(model=whole, optimizer=optimizer, config=config(stage))[0]
        steps = engine.step
    if late:
        hooked(optimizer, whole, calls, clips=stage != 3)
    for step in range(4):
        whole(batch(step, 0)).square().mean().backward()
        (steps if step % 2 else optimizer.step)()
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    with shoal.gathered(whole):
        return calls, [p.detach().clone() for p in whole.parameters()]


def hooks_of_all_loops() -> None:
    calls, values = hooks_of_a_loop(None)
    assert calls == [*["pre", "post of SGD"] * 4, "saving", "saved", "loading 2", "loaded"]
    for stage in range(4):
        for late in (False, True):
            ours, trained = hooks_of_a_loop(stage, late=late)
            assert ours == calls
            assert stage == 3 or all(map(torch.equal, trained, values))


@pytest.mark.parametrize("ranks", [1, 2])
def test_hooks_of_the_handed_optimizer_are_called_as_in_plain_torch(ranks: int) -> None:
    run_ranks(ranks, hooks_of_all_loops)


def zero_moments(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def forget_a_parameter(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]


def replace_an_entry(optimizer: Optimizer) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {}


EDITS: dict[str, tuple[Callable[[Optimizer], object], str]] = {
    "assign": (lambda optimizer: setattr(optimizer, "state", defaultdict[Tensor, Any](dict)), ""),
    "clear": (lambda optimizer: optimizer.state.clear(), ""),
    "groups": (lambda o: setattr(o, "param_groups", [{**group, "lr": 0.5} for group in o.param_groups]), ""),
    "zeros": (zero_moments, r"optimizer\.state: ranks hold slices of it at stages 1 to 3"),
    "entry": (replace_an_entry, r"optimizer\.state\[\.\.\.\] = \.\.\.: the engine keeps it in slices"),
    "values": (lambda optimizer: setattr(optimizer, "state", {1: {}}), "takes over no other values: clear it to begin"),
    "fewer": (forget_a_parameter, r"param_groups: got groups of \[3, 4\] parameters, and initialize laid out \[4, 4\]"),
    "no groups": (lambda o: setattr(o, "param_groups", []), r"got groups of \[\] parameters"),
}
"""Edits of a handed optimizer, and how they are refused; those of an empty text do what they do in plain PyTorch."""


def adam(whole: nn.Module) -> Optimizer:
    return torch.optim.AdamW([{"params": group["params"]} for group in sgd(whole).param_groups], lr=0.05)


def edited(edit: Callable[[Optimizer], object], stage: int | None, *, returned: bool = False) -> list[Tensor]:
    whole = model()
    optimizer = adam(whole)
    changed: Any = optimizer
    if stage is not None:
        handles = shoal.initialize(model=whole, optimizer=optimizer, config=config(stage))
        changed = handles[1] if returned else optimizer
    for step in range(4):
        whole(batch(step, 0)).square().mean().backward()
        if step == 2:
            edit(changed)
        optimizer.step()
        optimizer.zero_grad()
    with shoal.gathered(whole):
        return [p.detach().clone() for p in whole.parameters()]


def edits(stage: int) -> None:
    for name, (edit, refusal) in EDITS.items():
        if refusal and (name != "zeros" or stage):
            with pytest.raises(UsageError, match=refusal):
                edited(edit, stage)
            continue
        expected = edited(edit, None)
        for returned in (False,) if refusal else (False, True):
            torch.testing.assert_close(edited(edit, stage, returned=returned), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_edits_of_state_and_groups_count_as_in_plain_torch_or_raise(stage: int) -> None:
    run_ranks(2, edits, stage)


def by_hand(stage: int | None, rank: int, ranks: int) -> list[Tensor]:
    """Set `p.grad` with no backward pass, after one that is discarded, and before one that adds to it."""
    whole = model()
    optimizer = sgd(whole)
    if stage is not None:
        shoal.initialize(model=whole, optimizer=optimizer, config=config(stage))
    for step in range(5):
        mine = (rank,) if stage is not None else range(ranks)
        loss = torch.stack([whole(batch(step, each)).square().mean() for each in mine]).mean()
        if step == 1:
            loss.backward()
        optimizer.zero_grad()
        set_here = list(whole.parameters())[1:] if step < 4 else []
        for number, p in enumerate(set_here):
            p.grad = torch.full(p.shape, 0.25 * (number - step))
        if step > 1:
            loss.backward()
        optimizer.step()
    with shoal.gathered(whole):
        return [p.detach().clone() for p in whole.parameters()]


def all_by_hand(ranks: int) -> None:
    rank = torch.distributed.get_rank()
    for stage in range(4):
        torch.testing.assert_close(by_hand(stage, rank, ranks), by_hand(None, rank, ranks),
                                   rtol=0 if ranks == 1 else 1e-6, atol=0 if ranks == 1 else 1e-7)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_a_script_sets_itself_are_stepped(ranks: int) -> None:
    run_ranks(ranks, all_by_hand, ranks)


def beside_a_pass(stage: int | None) -> list[Any]:
    """Set, read, replace and clip gradients of a layer that the backward pass does not reach."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = sgd(whole)
    engine = None if stage is None else shoal.initialize(model=whole, optimizer=optimizer, config=config(stage))[0]
    seen: list[Any] = []
    for step in range(4):
        out = torch.ones(2, 4)
        loss = (whole if engine is None else engine)(out).sum() if step == 3 else whole[0](out).square().sum()
        for p in whole[1].parameters():
            p.grad = torch.full(p.shape, 1.0 + step)
        loss.backward()
        seen.append([None if p.grad is None else p.grad.clone() for p in whole.parameters()])
        if step == 1:
            whole[1].bias.grad = None
            whole[1].weight.grad = torch.full((4, 4), 7.0)
        if step == 2:
            torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in whole.parameters())]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_set_beside_a_pass_are_read_replaced_and_clipped(stage: int) -> None:
    torch.testing.assert_close(run_ranks(1, beside_a_pass, stage)[0], run_ranks(1, beside_a_pass, None)[0])


def set_alone(tier: str | None, folder: str, steps: int = 3) -> list[Tensor]:
    """Set every gradient, twice a step, the first time within an accumulation."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    optimizer: Any = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    if tier is not None:
        rest = {"device": tier, "nvme_path": folder} if tier else {"device": "none"}
        _, optimizer, *_ = shoal.initialize(model=whole, config={
            **config(3), "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            "zero_optimization": {"stage": 3, "offload_param": rest, "offload_optimizer": rest,
                                  "stage3_param_persistence_threshold": 8}})
    for step in range(steps):
        for part in range(2):
            for number, p in enumerate(whole.parameters()):
                value = torch.full(p.shape, 0.1 * number - step)
                p.grad = value if tier is not None or not part else p.grad + value
            if part or tier is not None:
                optimizer.step()
        optimizer.zero_grad()
    with shoal.gathered(whole):
        return [p.detach().clone() for p in whole.parameters()]


@pytest.mark.parametrize("tier", ["", "cpu", "nvme"])
def test_set_gradients_count_within_an_accumulation_and_in_every_tier(tier: str, tmp_path: Path) -> None:
    found, expected = (run_ranks(1, set_alone, each, str(tmp_path))[0] for each in (tier, None))
    torch.testing.assert_close(found, expected)


def set_with_a_loss_scale() -> None:
    whole = model()
    optimizer = sgd(whole)
    shoal.initialize(model=whole, optimizer=optimizer, config=config(0, fp16={"enabled": True}))
    whole[0].weight.grad = torch.ones_like(whole[0].weight)
    with pytest.raises(UsageError, match=r"p\.grad of '0\.weight' was set outside of a backward pass, .* loss scale 65536"):
        optimizer.step()


def test_set_gradients_raise_where_the_step_divides_by_a_loss_scale() -> None:
    run_ranks(1, set_with_a_loss_scale)


def entries(stage: int) -> None:
    whole = model()
    optimizer = adam(whole)
    shoal.initialize(model=whole, optimizer=optimizer, config=config(stage))
    parameter = whole[0].weight
    assert optimizer.state[parameter] == {} and optimizer.state.get(parameter) is None and parameter not in optimizer.state
    refusal = r"optimizer\.state\[\.\.\.\]\[\.\.\.\] = \.\.\.: the engine keeps it .* of your own"
    with pytest.raises(UsageError, match=refusal):
        optimizer.state[parameter]["old_p"] = parameter.detach()
    whole(batch(0, 0)).square().mean().backward()
    optimizer.step()
    if stage:
        return
    assert parameter in optimizer.state
    before = optimizer.state[parameter]["exp_avg"].clone()
    optimizer.state[parameter]["exp_avg"] *= 0.5
    assert torch.equal(optimizer.state[parameter]["exp_avg"], before * 0.5)
    for change in (lambda state: state.update(step=torch.tensor(0.0)), lambda state: state.pop("exp_avg")):
        with pytest.raises(UsageError, match=refusal):
            change(optimizer.state[parameter])
    assert type(copy.deepcopy(optimizer.state[parameter])) is dict


@pytest.mark.parametrize("stage", [0, 1])
def test_values_of_the_state_are_not_replaced_in_silence(stage: int) -> None:
    run_ranks(1, entries, stage)


def cleared_adagrad() -> None:
    whole = model()
    optimizer = torch.optim.Adagrad(whole.parameters())
    shoal.initialize(model=whole, optimizer=optimizer, config=config(1))
    with pytest.raises(UsageError, match=r"optimizer\.state: Adagrad cannot step from an empty state"):
        optimizer.state.clear()


def test_an_optimizer_that_allocates_its_state_keeps_it() -> None:
    run_ranks(1, cleared_adagrad)


class Within(nn.Module):
    """A model whose forward is the whole training step, as frameworks call it through the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: Tensor, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        self.layers(x).square().mean().backward()
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_grad_is_there_after_a_backward_within_a_forward(stage: int) -> None:
    plain, whole = Within(), Within()
    expected, optimizer = sgd(plain), sgd(whole)
    engine, *_ = shoal.initialize(model=whole, optimizer=optimizer, config=config(stage))
    for step in range(STEPS):
        plain(batch(step, 0), expected)
        engine(batch(step, 0), optimizer)
    for found, wanted in zip(whole.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)
    engine.destroy()


def test_grad_within_a_forward_at_stage_3_says_what_to_call() -> None:
    whole = Within()
    optimizer = sgd(whole)
    engine, *_ = shoal.initialize(model=whole, optimizer=optimizer, config=config(3))
    with pytest.raises(UsageError, match="gradient_clipping"):
        engine(batch(0, 0), optimizer)
    engine.destroy()
