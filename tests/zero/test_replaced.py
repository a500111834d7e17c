"""Scripts that give parameters other memory train as in plain PyTorch, or are told which parameter cannot be followed."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import ReleasedError, UsageError
from shoal.testing import run_ranks

Idiom = Callable[[nn.Module, Callable[[], Tensor]], None]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))


def sgd(whole: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9, foreach=False)


def batch(step: int) -> Tensor:
    return torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(step))


def swap_averages(whole: nn.Module, evaluate: Callable[[], Tensor]) -> None:
    """Evaluate with other weights, and train on with the former ones: the usual class of averaged weights."""
    backup = {name: p.data for name, p in whole.named_parameters()}
    for p in whole.parameters():
        p.data = p.data * 0.5
    evaluate()
    for name, p in whole.named_parameters():
        p.data = backup[name]


def shrink(whole: nn.Module, evaluate: Callable[[], Tensor]) -> None:
    for p in whole.parameters():
        p.data = p.data * 0.9


def from_vector(whole: nn.Module, evaluate: Callable[[], Tensor]) -> None:
    vector = nn.utils.parameters_to_vector(whole.parameters())
    nn.utils.vector_to_parameters(vector * 1.5, whole.parameters())


def convert_and_back(whole: nn.Module, evaluate: Callable[[], Tensor]) -> None:
    whole.double().float()


def round_to_half(whole: nn.Module, evaluate: Callable[[], Tensor]) -> None:
    whole.half().float()


def channels_last(whole: nn.Module, evaluate: Callable[[], Tensor]) -> None:
    whole.to(memory_format=torch.channels_last)


def transpose(whole: nn.Module, evaluate: Callable[[], Tensor]) -> None:
    whole[2].weight.data = whole[2].weight.data.t()


IDIOMS: tuple[Idiom, ...] = (swap_averages, shrink, from_vector, convert_and_back, round_to_half, channels_last, transpose)


def plain(idiom: Idiom) -> list[Tensor]:
    whole = model()
    optimizer = sgd(whole)
    for step in range(4):
        whole(batch(step)).square().mean().backward()
        if step == 1 and idiom is not round_to_half:  # between backward and step; torch would round the gradients too
            idiom(whole, partial(whole, batch(9)))
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            with torch.no_grad():
                idiom(whole, partial(whole, batch(9)))
    return [p.detach().contiguous() for p in whole.parameters()]


def sharded(stage: int) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for idiom in IDIOMS:
        whole = model()
        engine = shoal.initialize(model=whole, optimizer=sgd(whole), config={
            "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "zero_optimization": {"stage": stage}})[0]
        for step in range(4):
            engine.backward(engine(batch(step)).square().mean())
            if step == 1 and idiom is not round_to_half:
                idiom(whole, partial(engine, batch(9)))
            engine.step()
            if step == 2:
                with torch.no_grad():
                    idiom(whole, partial(engine, batch(9)))
        assert all(p.is_contiguous() for p in whole.parameters())
        found[idiom.__name__] = [p.detach().clone() for p in whole.parameters()]
        engine.destroy()
    return found


class Shrinking(nn.Linear):
    """A layer whose forward writes its own weights: in place, or as other memory. So does `within` with those of another."""

    def __init__(self, form: str, within: bool):
        super().__init__(12, 12)
        self.form = form
        self.other = nn.Linear(12, 12) if within else None

    def forward(self, input: Tensor) -> Tensor:
        written = self if self.other is None else self.other
        if self.form == "in place":
            with torch.no_grad():
                written.weight.mul_(0.9)
        else:
            written.weight.data = written.weight.data * 0.9
        return super().forward(input) if self.other is None else self.other(super().forward(input))


def trained(form: str, within: bool, stage: int | None, accumulation: int = 1) -> list[Tensor]:
    """Train a model that writes its weights in its forward, without an engine if `stage` is None."""
    torch.manual_seed(0)
    whole: Any = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), Shrinking(form, within), nn.Tanh(), nn.Linear(12, 3))
    optimizer = sgd(whole)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "gradient_accumulation_steps": accumulation,
              "zero_optimization": {"stage": stage}}
    engine = None if stage is None else shoal.initialize(model=whole, optimizer=optimizer, config=config)[0]
    for step in range(4 * accumulation):
        if engine is None:
            (whole(batch(step)).square().mean() / accumulation).backward()
            if (step + 1) % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
        else:
            engine.backward(engine(batch(step)).square().mean())
            engine.step()
        with torch.no_grad():
            (whole if engine is None else engine)(batch(99))
    with shoal.gathered(whole):
        return [p.detach().clone() for p in whole.parameters()]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("form", ["in place", "other memory"])
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_forward_may_write_weights(form: str, within: bool, stage: int, ranks: int, accumulation: int) -> None:
    expected = trained(form, within, None, accumulation)
    for found in run_ranks(ranks, trained, form, within, stage, accumulation):
        for value, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(value, wanted)


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_with_other_memory_train_as_in_plain_torch(ranks: int) -> None:
    for stage in range(3):
        for found in run_ranks(ranks, sharded, stage):
            for idiom in IDIOMS:
                # Shoal keeps weights contiguous; a processor may convolve another layout with another kernel
                close = {"rtol": 1e-5, "atol": 1e-6} if idiom is channels_last else {"rtol": 0.0, "atol": 0.0}
                for value, expected in zip(found[idiom.__name__], plain(idiom), strict=True):
                    torch.testing.assert_close(value, expected, **close, msg=lambda text, at=(stage, idiom): f"{at}: {text}")


def replace_object(whole: nn.Module) -> None:
    whole.load_state_dict({name: value.clone() for name, value in whole.state_dict().items()}, assign=True)


def share(whole: nn.Module) -> None:
    whole[4].bias.data = whole[0].bias.data


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "half": (lambda whole: whole.half(), r"parameter '0\.weight' became torch\.float16 .* trains it as torch\.float32"),
    "double": (lambda whole: whole.double(), r"parameter '0\.weight' became torch\.float64 .* Convert the model back"),
    "assign": (replace_object, r"parameter '0\.weight' is another object since initialize"),
    "share": (share, r"parameter '4\.bias' was given the memory of another parameter"),
}


def refused(stage: int, optimizer: dict[str, Any]) -> dict[str, str]:
    errors: dict[str, str] = {}
    for name, (change, _) in REFUSED.items():
        whole = model()
        engine = shoal.initialize(model=whole, config={"train_micro_batch_size_per_gpu": 4, "optimizer": optimizer,
                                                       "zero_optimization": {"stage": stage}})[0]
        change(whole)
        with pytest.raises(UsageError) as raised:
            engine(batch(0).to(whole[0].weight.dtype))
        errors[name] = str(raised.value)
    return errors


@pytest.mark.parametrize("stage", [0, 2])
def test_values_that_the_engine_cannot_train_are_refused_by_name(stage: int) -> None:
    errors = run_ranks(1, refused, stage, {"type": "AdamW", "params": {"lr": 0.1}})[0]
    for name, (_, expected) in REFUSED.items():
        assert re.search(expected, errors[name]), errors[name]


def rounded(stage: int) -> tuple[float, float, str]:
    """Assign a value that 16 bits hold to weights whose masters are wider, and to sharded ones within `gathered`."""
    whole = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    engine = shoal.initialize(model=whole, config={
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 0.25}}})[0]
    value = torch.full((8, 8), 3.0, dtype=torch.bfloat16)
    if stage == 3:
        with pytest.raises(ReleasedError) as raised:
            whole[1].weight.data = value
        with shoal.gathered(whole, modifier_rank=0):
            whole[1].weight.data = value
    else:
        whole[1].weight.data = value
        with pytest.raises(UsageError) as raised:
            engine.save_checkpoint("nowhere")
    engine.backward(engine(torch.zeros(4, 8, dtype=torch.bfloat16)).sum())  # no gradient: the masters stay as assigned
    engine.step()
    state = engine.consolidated_state_dict(torch.float32) or {"1.weight": torch.full((1,), 3.0)}
    with shoal.gathered(whole):
        weight = whole[1].weight.float().mean().item()
    return state["1.weight"].mean().item(), weight, str(raised.value)


def test_masters_follow_weights_that_are_given_other_memory() -> None:
    for stage in range(4):
        said = "read the data of parameter" if stage == 3 else "save_checkpoint: parameter '1.weight' was given other memory"
        for master, weight, error in run_ranks(2, rounded, stage):
            assert master == weight == 3.0, stage
            assert said in error


class WithUpdate(nn.Module):
    """A frozen layer with a trained update, as adapters are added to a model."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base, self.update = base.requires_grad_(False), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.update


def new_head(whole: nn.Module) -> None:
    whole[4] = nn.Linear(12, 3)


def adapter(whole: nn.Module) -> None:
    whole[4] = WithUpdate(whole[4])


def registered(whole: nn.Module) -> None:
    whole[3].register_parameter("slope", nn.Parameter(torch.ones(1)))


GAINED = {"4.weight": new_head, "4.update": adapter, "3.slope": registered}


def gained(stage: int) -> dict[str, str]:
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    errors: dict[str, str] = {}
    for name, change in GAINED.items():
        whole = model()
        known = set(whole.parameters())
        engine = shoal.initialize(model=whole, optimizer=sgd(whole), config=config)[0]
        engine(batch(0))
        change(whole)
        with torch.no_grad():
            engine(batch(0))  # nothing is trained
        with pytest.raises(UsageError) as raised:
            engine(batch(0))
        errors[name] = str(raised.value)
        added = [parameter for parameter in whole.parameters() if parameter.requires_grad and parameter not in known]
        for parameter in added:
            parameter.requires_grad_(False)
        engine(batch(0))
        for parameter in added:
            parameter.requires_grad_(True)
        with pytest.raises(UsageError, match="was added to the model after initialize"):
            engine(batch(0))
        engine.destroy()
        trained = shoal.initialize(model=whole, optimizer=sgd(whole), config=config)[0]
        trained.backward(trained(batch(0)).square().mean())
        trained.step()
    return errors


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_added_after_initialize_are_refused_by_name(stage: int) -> None:
    for name, error in run_ranks(1, gained, stage)[0].items():
        assert error.startswith(f"forward: parameter '{name}' was added to the model after initialize"), error
        assert "then call initialize; or freeze the parameter by requires_grad_(False)" in error
