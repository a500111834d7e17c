"""Slice the layers of an existing model in place: all ranks start with the same whole model, each keeps its slices.

    compare    ranks have the same plan, model and weights, or all raise
    convert    replace each module that the plan matches, parents first
    retie      give parameters that were tied to a sliced one its slice
    align      give the ranks' default generators one state, so that whole tensors get the same dropout

A failure on any rank or stage rolls the model back on all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import RanksDisagree, UsageError
from shoal.mesh.tensor_slice import SlicedModule, cuts_of
from shoal.tensor_parallel.part_init import ParameterSlices
from shoal.tensor_parallel.plan import Match, ModelInventory, Plan, inventory_of, match_modules
from shoal.tensor_parallel.plan_rules import ConversionContext, Region, Whole
from shoal.tensor_parallel.plans import plan_for
from shoal.tensor_parallel.random import Apart, RankLocalRng, align
from shoal.transport.collectives import Communicator
from shoal.tree import bits_of

__all__ = ["parallelize"]

M = TypeVar("M", bound=nn.Module)


def parallelize(model: M, group: dist.ProcessGroup, plan: Plan | None = None, *, sequence_parallel: bool = False,
                stages: dist.ProcessGroup | None = None, timeout: float = 600.0) -> M:
    """Slice the layers of `model` over the ranks of `group` according to the plan, in place; return the model. A collective.

    Without a plan, use the one for the model's class (Hugging Face transformers; `PLANS` in plans.py), with sequences split
    between regions if `sequence_parallel`. If this rank has only some pipeline stages of the model, `stages` is the process
    group of all stages: each pattern has to match in one of them. The ranks must hold the same weights. Afterwards each
    holds its slices, and all have the first rank's random state. Raises `UsageError` if plan and model do not fit or sizes
    do not divide, `RanksDisagree` if ranks have different plans or weights; on all ranks.
    """
    _check_arguments(group, plan)
    failure: UsageError | None = None
    try:
        plan = _resolve_plan(model, plan, sequence_parallel=sequence_parallel)
    except UsageError as error:
        failure = error
    _compare(group, [str(failure)] if plan is None else [*plan.describe(), *_fingerprint(model)], timeout)
    if failure is not None or plan is None:
        raise failure or AssertionError("neither a plan nor a failure")
    stage_ranks = None if stages is None else Communicator(stages, timeout=timeout)
    inventory, slices = _inventory_of_all_stages(plan, model, stage_ranks), ParameterSlices()
    with _rollback_on_failure(model):
        try:
            matches = match_modules(plan, model, inventory)
            _convert(model, matches, group, plan.sequence_dim, slices)
            _retie(model, matches, slices)
        except UsageError as error:
            failure = error
        _raise_on_all_stages(failure, stage_ranks)
    align(group, timeout=timeout)
    return model


def _check_arguments(group: object, plan: object) -> None:
    """Raise `UsageError` if `group` is no process group or `plan` no plan."""
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(f"parallelize: group: got {group!r}; give the process group of the ranks that share the layers, "
                         f"such as mesh.group('tensor'), or torch.distributed.group.WORLD once init_distributed was called")
    if plan is not None and not isinstance(plan, Plan):
        raise UsageError(f"parallelize: plan: got a {type(plan).__name__}; give a Plan: Plan({{name pattern: kind}}), as "
                         f"docs/tensor_parallel.md shows")


def _inventory_of_all_stages(plan: Plan, model: nn.Module, stages: Communicator | None) -> ModelInventory:
    """Return the summed inventory of all stages. Raises `RanksDisagree` if they have different plans."""
    inventory = inventory_of(model, plan)
    if stages is None:
        return inventory
    gathered = stages.gather_objects((inventory, plan.describe()))
    _refuse_differences([lines for _, lines in gathered], "pipeline")
    for other in (theirs for rank, (theirs, _) in enumerate(gathered) if rank != stages.rank):
        inventory += other
    return inventory


def _raise_on_all_stages(failure: UsageError | None, stages: Communicator | None) -> None:
    """Raise the failure of any stage on all of them."""
    text = None if failure is None else str(failure)
    failures = [text] if stages is None else stages.gather_objects(text)
    if failure is not None:
        raise failure
    for stage, text in enumerate(failures):
        if text is not None:
            raise UsageError(f"parallelize: pipeline rank {stage}: {text}")


@contextmanager
def _rollback_on_failure(model: nn.Module) -> Generator[None]:
    """Restore the attributes and hooks of all modules if the body raises."""
    saved = [(module, {name: dict(value) if type(value) in (dict, OrderedDict) else value
                       for name, value in vars(module).items()}) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, before in saved:
            now = vars(module)
            for name in set(now) - set(before):
                del now[name]
            for name, value in before.items():
                if type(now.get(name)) in (dict, OrderedDict) and isinstance(value, dict):
                    _refill(now[name], value)  # a hook's handle refers to this dict
                else:
                    now[name] = value
        raise


def _refill(target: dict[Any, Any], before: dict[Any, Any]) -> None:
    target.clear()
    target.update(before)


def _resolve_plan(model: nn.Module, plan: Plan | None, *, sequence_parallel: bool) -> Plan:
    if plan is None:
        return plan_for(model, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        raise UsageError("parallelize: sequence_parallel is for plans that the library finds; give your own plan its "
                         "sequence_dim instead: Plan(..., sequence_dim=1)")
    return plan


def _fingerprint(model: nn.Module) -> Iterator[str]:
    """Yield a line for each module's class, and each tensor's shape and dtype, with its bits unless it is sliced already."""
    sliced = cuts_of(model)
    for path, module in model.named_modules():
        yield f"module '{path}': {type(module).__name__}"
        tensors: dict[str, Tensor] = {**dict(module.named_parameters(recurse=False)),
                                      **dict(module.named_buffers(recurse=False))}
        for name, tensor in tensors.items():
            full_name = f"{path}.{name}" if path else name
            bits = "a part" if full_name in sliced else f"bits that sum to {bits_of(tensor)}"
            yield f"'{full_name}': {tuple(tensor.shape)} {tensor.dtype}, {bits}"


def _compare(group: dist.ProcessGroup, lines: list[str], timeout: float) -> None:
    _refuse_differences(Communicator(group, timeout=timeout).gather_objects(lines), "tensor")


def _refuse_differences(lines_by_rank: list[list[str]], axis: str) -> None:
    """Raise `RanksDisagree` at the first line that is not equal on all ranks of an axis."""
    for by_rank in zip_longest(*lines_by_rank, fillvalue="nothing"):
        if len(set(by_rank)) > 1:
            listed = "; ".join(f"rank {rank} has {line}" for rank, line in enumerate(by_rank))
            raise RanksDisagree(f"parallelize: the {axis} ranks begin with different plans or models: {listed}. Give all of "
                                f"them one plan, and build the model from one seed or one checkpoint")


def _convert(model: nn.Module, matches: list[Match], group: dist.ProcessGroup, sequence_dim: int | None,
             slices: ParameterSlices) -> None:
    """Convert the matched modules and put the results in their places."""
    regions: dict[str, tuple[Region, RankLocalRng]] = {}
    converted: dict[nn.Module, tuple[Match, nn.Module]] = {}
    for match in matches:
        if match.module not in converted:
            enclosing = [region for path, region in regions.items() if match.path.startswith(f"{path}.")]
            rngs = [rng for region, rng in enclosing if region.dropout]
            if isinstance(match.kind, Region):
                rngs.append(RankLocalRng(Apart(dist.get_rank(group))))
                regions[match.path] = match.kind, rngs[-1]
            context = ConversionContext(group=group, sequence_dim=sequence_dim, slices=slices, path=match.path,
                                        rng=rngs[-1] if rngs else None,
                                        entered=any(region.enter is not None for region, _ in enclosing))
            converted[match.module] = match, _converted(match, context)
        first, new_module = converted[match.module]
        if first.kind != match.kind:
            raise UsageError(f"{first.path} and {match.path} are one module, and the plan does two things with it: "
                             f"{first.kind} and {match.kind}")
        if new_module is not match.module:
            parent, _, name = match.path.rpartition(".")
            setattr(model.get_submodule(parent), name, new_module)


def _converted(match: Match, context: ConversionContext) -> nn.Module:
    if isinstance(match.module, SlicedModule):
        raise UsageError(f"{match.path}: {type(match.module).__name__} is sliced already; parallelize a model once")
    try:
        return match.kind.convert(match.module, context)
    except UsageError as error:
        raise UsageError(f"{match.path}: {error}") from error


def _retie(model: nn.Module, matches: list[Match], slices: ParameterSlices) -> None:
    """Tie to the slices the parameters that were tied to the whole ones."""
    follows = {match.module: match.kind.follows for match in matches if isinstance(match.kind, Whole)}
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in slices.taken:
                continue
            if name not in follows.get(module, ()):
                raise UsageError(f"{path}.{name} is tied to a parameter that is sliced, and {type(module).__name__} is not: "
                                 f"slice it likewise, untie it, or if it only holds it: Whole(follows=({name!r},))")
            setattr(module, name, slices.taken[parameter][1])
