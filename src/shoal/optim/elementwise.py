"""Checks that an optimizer is elementwise: a rank steps flat slices of parameters, which must give the same training.

Torch's own classes are known by exact class. Any other is probed: three steps on a random matrix, and on the same numbers
cut into two flat pieces, must give bitwise equal weights. A script's optimizer is probed as it is, with its own attributes
and the options of each of its groups. LAMB is not elementwise and has a two-pass step.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from shoal.errors import OptimizerError
from shoal.log import warn_once
from shoal.optim.adam import BiasedAdam
from shoal.optim.lamb import Lamb
from shoal.optim.lion import Lion
from shoal.optim.onebit import OneBitAdam, ZeroOneAdam
from shoal.optim.onebit_lamb import OneBitLamb
from shoal.optim.own_attributes import copied, own_attributes

__all__ = ["ADAM_MOMENTS", "ELEMENTWISE", "LAYERWISE", "WHOLE_TENSOR", "arithmetic_class", "blank_state",
           "check_elementwise", "check_instance", "count_moments"]

ADAM_MOMENTS = 2

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset({
    Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, BiasedAdam, Lion, NAdam, OneBitAdam, RAdam, RMSprop, Rprop, SGD,
    ZeroOneAdam,
})  # fmt: skip
LAYERWISE: frozenset[type[Optimizer]] = frozenset({Lamb, OneBitLamb})
"""Classes whose update is elementwise except for one factor per parameter (layerwise.py)."""
WHOLE_TENSOR: Mapping[type[Optimizer], str] = {
    torch.optim.Adafactor: "keeps row and column means of whole matrices, and the norm of whole tensors",
    torch.optim.LBFGS: "takes inner products over all parameters at once, and evaluates the model many times a step",
    torch.optim.Muon: "orthogonalises whole matrices",
    torch.optim.SparseAdam: "steps only sparse gradients, and slices of a flat buffer are dense",
}
_USE_INSTEAD = "use an elementwise one instead: AdamW, Adam, SGD, Adagrad, Lion, RMSprop, RAdam, NAdam or Adamax; or Lamb"

_Build = Callable[[list[Tensor]], Optimizer]
"""Builds an optimizer of weights."""

# Shape of the probe and where it is cut. Both pieces are whole vectors: a kernel may round a partial vector differently.
_SHAPE, _CUT, _STEPS = (16, 12), 64, 3


def arithmetic_class(optimizer_class: type[Optimizer]) -> type[Optimizer]:
    """Return the class whose arithmetic a step of `optimizer_class` is.

    A subclass that adds a constructor alone, with other defaults, steps as its base does.
    """
    base = optimizer_class
    while base not in ELEMENTWISE and base not in LAYERWISE and issubclass(base.__mro__[1], Optimizer) and _constructs(base):
        base = base.__mro__[1]
    return base


def _constructs(optimizer_class: type[Optimizer]) -> bool:
    """Whether the class itself defines nothing but its constructor. Torch puts a wrapped `step` into each class."""
    own = {name: value for name, value in vars(optimizer_class).items() if not name.startswith("__")}
    step, inherited = own.pop("step", None), getattr(optimizer_class.__mro__[1], "step", None)
    return not own and (step is None or inspect.unwrap(step) is inspect.unwrap(inherited or step))


def check_elementwise(optimizer_class: type[Optimizer], defaults: Mapping[str, Any], *, trusted: bool = False) -> None:
    """Raise `OptimizerError` unless `optimizer_class` steps every element by itself, or is one of `LAYERWISE`.

    `defaults` are an instance's (they become the keywords of a probe). `trusted` (`zero_allow_untested_optimizer`)
    accepts a class that cannot be probed, but not one whose probe mixed elements.
    """
    def build(weights: list[Tensor]) -> Optimizer:
        return optimizer_class(weights, **_keywords(optimizer_class, defaults))

    _check(optimizer_class, build, trusted=trusted)


def check_instance(optimizer: Optimizer, *, trusted: bool = False) -> None:
    """Raise `OptimizerError` as `check_elementwise` does for the script's `optimizer`, with the options of each group.

    Likewise for one that steps by another optimizer, whose state nobody would shard or save.
    """
    if arithmetic_class(type(optimizer)) in ELEMENTWISE | LAYERWISE:
        return
    wrapped = [name for name, value in own_attributes(optimizer).items() if isinstance(value, Optimizer)]
    if wrapped:
        raise OptimizerError(f"optimizer: {type(optimizer).__name__} steps by another optimizer, which it keeps as "
                             f"'{wrapped[0]}'; hand that one to initialize, and wrap the optimizer that it returns")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:  # an optimizer that keeps them elsewhere too would step them in a probe
        parameter.grad = None
    try:
        _check_groups(optimizer, trusted=trusted)
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _check_groups(optimizer: Optimizer, *, trusted: bool) -> None:
    distinct: dict[object, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        if not options.get("lr", 1):  # a warm-up may begin at a rate of 0, by which a probe would see nothing
            options["lr"] = options.get("initial_lr") or optimizer.defaults.get("lr") or 1e-3
        distinct.setdefault(tuple((name, _kind_of(value)) for name, value in options.items()), options)
    for options in distinct.values():
        if optimizer.state:  # allocated at construction, for the weights that it was given
            check_elementwise(type(optimizer), {**optimizer.defaults, **options}, trusted=trusted)
        else:
            _check(type(optimizer), partial(_twin, optimizer, options), trusted=trusted)


def _kind_of(value: object) -> object:
    """Return what tells options apart that may step in different ways: of a number, whether it is 0."""
    return value if isinstance(value, bool | str) else bool(value) if isinstance(value, int | float) else type(value)


def _twin(optimizer: Optimizer, options: Mapping[str, Any], weights: list[Tensor]) -> Optimizer:
    """Return an optimizer of `weights` that steps as `optimizer` does; its step changes nothing of that one."""
    twin = copied(optimizer)
    containers = {name: value.clone() if isinstance(value, Tensor) else copy(value) for name, value in vars(twin).items()
                  if isinstance(value, list | dict | set | Tensor)}
    # A capturable step refuses the CPU, where probes run; it computes the same.
    capturable = {"capturable": False} if "capturable" in options else {}
    vars(twin).update(containers, state=defaultdict(dict), param_groups=[{**options, **capturable, "params": weights}])
    return twin


def _check(optimizer_class: type[Optimizer], build: _Build, *, trusted: bool) -> None:
    """Raise `OptimizerError` unless the optimizers that `build` makes of weights step every element by itself."""
    name = optimizer_class.__name__
    known = arithmetic_class(optimizer_class)
    if known in ELEMENTWISE or known in LAYERWISE:
        return
    if optimizer_class in WHOLE_TENSOR:
        raise OptimizerError(f"optimizer: {name} {WHOLE_TENSOR[optimizer_class]}, but a rank steps flat slices of "
                             f"parameters; {_USE_INSTEAD}")
    try:
        same = _same_on_slices(build)
    except Exception as error:  # a foreign class may raise anything when it is built or stepped on a probe
        problem = f"{type(error).__name__}: {error}"
        if not trusted:
            raise OptimizerError(
                f"optimizer: {name} could not be probed for stepping slices as it steps whole tensors ({problem}); "
                f"{_USE_INSTEAD}, or set zero_allow_untested_optimizer to true if you know that every element of a "
                f"parameter steps by itself") from error
        warn_once(f"optimizer: {name} could not be probed ({problem}); zero_allow_untested_optimizer lets it step "
                  f"slices, which is right only if every element of a parameter steps by itself")
        return
    if not same:
        raise OptimizerError(f"optimizer: {name} is not elementwise: {_STEPS} steps on a matrix of {_SHAPE[0]} x "
                             f"{_SHAPE[1]} and on the same numbers in two flat pieces gave different weights, but a rank "
                             f"steps flat slices of parameters; {_USE_INSTEAD}")


def count_moments(optimizer_class: type[Optimizer], defaults: Mapping[str, Any]) -> int:
    """Return the number of tensors of its shape that the optimizer keeps for a weight; 2, as Adam, if unknown."""
    try:
        return sum(value.dim() > 0 for value in blank_state(optimizer_class, defaults).values())
    except Exception:  # a foreign class may raise anything when it is built or stepped on a probe
        return ADAM_MOMENTS


def blank_state(optimizer_class: type[Optimizer], defaults: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that the optimizer keeps for a weight, with zeros in them: of a weight's shape, or one number."""
    weight = torch.zeros(_SHAPE, dtype=torch.float32, requires_grad=True, device="cpu")
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        optimizer = optimizer_class([weight], **_keywords(optimizer_class, defaults))
        weight.grad = torch.ones(_SHAPE, dtype=torch.float32, device="cpu")
        optimizer.step()
    state = optimizer.state.get(weight, {})
    return {name: torch.zeros_like(value) for name, value in state.items()
            if isinstance(value, Tensor) and value.shape in (weight.shape, ())}


def _keywords(optimizer_class: type[Optimizer], defaults: Mapping[str, Any]) -> dict[str, Any]:
    accepted = inspect.signature(optimizer_class).parameters
    # A capturable step refuses the CPU, where probes run; it computes the same.
    return {keyword: value for keyword, value in defaults.items() if keyword in accepted and keyword != "capturable"}


def _same_on_slices(build: _Build) -> bool:
    random = torch.Generator().manual_seed(0)
    weight, *gradients = (torch.randn(_SHAPE, generator=random, dtype=torch.float32, device="cpu")
                          for _ in range(_STEPS + 1))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        whole = _stepped(build, [weight], [[gradient] for gradient in gradients])
        pieces = _stepped(build, _pieces(weight), [_pieces(gradient) for gradient in gradients])
    if torch.equal(whole, weight.flatten()):
        raise ValueError("its steps leave the weights of a probe as they are")
    return torch.equal(whole, pieces)


def _stepped(build: _Build, weights: list[Tensor], gradients: list[list[Tensor]]) -> Tensor:
    torch.default_generator.manual_seed(0)  # the CPU's alone, which the caller forked
    weights = [weight.clone().requires_grad_() for weight in weights]
    optimizer = build(weights)
    for step in gradients:
        for weight, gradient in zip(weights, step, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in weights])


def _pieces(tensor: Tensor) -> list[Tensor]:
    return list(tensor.flatten().split([_CUT, tensor.numel() - _CUT]))
