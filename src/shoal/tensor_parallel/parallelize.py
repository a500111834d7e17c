"""Cut the layers of a model that exists, in place: every rank begins with the same whole model, and keeps its part.

    compare    ranks have the same plan, model and weights, or all raise
    convert    each module that the plan matches, those around others first
    settle     what was tied to a cut parameter is tied to its part
    align      the ranks' default generators, so that whole tensors drop alike

A model is cut or left as it was: where something does not fit, here or in another stage, all that was done is undone.
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
from shoal.tensor_parallel.forward_hooks import RankLocalRng
from shoal.tensor_parallel.part_init import Taken
from shoal.tensor_parallel.plan import Elsewhere, Match, Plan, assign, found_in
from shoal.tensor_parallel.plan_rules import Region, Site, Whole
from shoal.tensor_parallel.plans import plan_for
from shoal.tensor_parallel.random import Apart, align
from shoal.transport.collectives import Communicator
from shoal.tree import bits_of

__all__ = ["parallelize"]

M = TypeVar("M", bound=nn.Module)


def parallelize(model: M, group: dist.ProcessGroup, plan: Plan | None = None, *, sequence_parallel: bool = False,
                stages: dist.ProcessGroup | None = None, timeout: float = 600.0) -> M:
    """Cut the layers of `model` over the ranks of `group` as the plan says, in place, and return it. A collective.

    Without a plan it is the one for the model's class (of Hugging Face transformers: `PLANS` in plans.py), with sequences
    split between regions if `sequence_parallel`. A model that is in stages of a pipeline, of which this rank has some, comes
    with the ranks of the others in `stages`: what the plan names need only be in one of them. The ranks must hold the same
    weights; afterwards each holds its part, and they have the first rank's random state. Raises `UsageError` where plan and
    model do not fit or sizes do not divide, `RanksDisagree` where ranks have different plans or weights, on all ranks alike.
    """
    _refuse_odd(group, plan)
    trouble: UsageError | None = None
    try:
        plan = _chosen(model, plan, sequence_parallel=sequence_parallel)
    except UsageError as error:
        trouble = error
    _compare(group, [str(trouble)] if plan is None else [*plan.describe(), *_fingerprint(model)], timeout)
    if trouble is not None or plan is None:
        raise trouble or AssertionError("neither a plan nor a reason")
    others = None if stages is None else Communicator(stages, timeout=timeout)
    whole, taken = _gathered(plan, model, others), Taken()
    with _as_it_was_after_failure(model):
        try:
            matches = assign(plan, model, whole)
            _convert(model, matches, group, plan.sequence_dim, taken)
            _settle(model, matches, taken)
        except UsageError as error:
            trouble = error
        _told(trouble, others)
    align(group, timeout=timeout)
    return model


def _refuse_odd(group: object, plan: object) -> None:
    """Raise `UsageError` for what is neither a group of processes nor a plan."""
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(f"parallelize: group: got {group!r}; give the process group of the ranks that share the layers, "
                         f"such as mesh.group('tensor'), or torch.distributed.group.WORLD once init_distributed was called")
    if plan is not None and not isinstance(plan, Plan):
        raise UsageError(f"parallelize: plan: got a {type(plan).__name__}; give a Plan: Plan({{name pattern: kind}}), as "
                         f"docs/tensor_parallel.md shows")


def _gathered(plan: Plan, model: nn.Module, stages: Communicator | None) -> Elsewhere:
    """Return what there is in all stages. Raises `RanksDisagree` where these have other plans."""
    here = found_in(model, plan)
    if stages is None:
        return here
    said = stages.gather_objects((here, plan.describe()))
    _refuse_differences([lines for _, lines in said], "pipeline")
    for other in (theirs for rank, (theirs, _) in enumerate(said) if rank != stages.rank):
        here += other
    return here


def _told(trouble: UsageError | None, stages: Communicator | None) -> None:
    """Raise what went wrong in some stage, in all of them."""
    said = [None if trouble is None else str(trouble)] if stages is None else stages.gather_objects(
        None if trouble is None else str(trouble))
    if trouble is not None:
        raise trouble
    for stage, text in enumerate(said):
        if text is not None:
            raise UsageError(f"parallelize: pipeline rank {stage}: {text}")


@contextmanager
def _as_it_was_after_failure(model: nn.Module) -> Generator[None]:
    """Put back what modules hold, and which hooks they have, if the body fails."""
    kept = [(module, {name: dict(value) if type(value) in (dict, OrderedDict) else value
                      for name, value in vars(module).items()}) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, before in kept:
            now = vars(module)
            for name in set(now) - set(before):
                del now[name]
            for name, value in before.items():
                if type(now.get(name)) in (dict, OrderedDict) and isinstance(value, dict):
                    _refill(now[name], value)  # a hook's handle knows the very dict
                else:
                    now[name] = value
        raise


def _refill(held: dict[Any, Any], before: dict[Any, Any]) -> None:
    held.clear()
    held.update(before)


def _chosen(model: nn.Module, plan: Plan | None, *, sequence_parallel: bool) -> Plan:
    if plan is None:
        return plan_for(model, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        raise UsageError("parallelize: sequence_parallel is for plans that the library finds; give your own plan its "
                         "sequence_dim instead: Plan(..., sequence_dim=1)")
    return plan


def _fingerprint(model: nn.Module) -> Iterator[str]:
    """Yield a line for each module's class, and each tensor's shape, dtype and bits if it is not cut already."""
    cut = cuts_of(model)
    for path, module in model.named_modules():
        yield f"module '{path}': {type(module).__name__}"
        tensors: dict[str, Tensor] = {**dict(module.named_parameters(recurse=False)),
                                      **dict(module.named_buffers(recurse=False))}
        for name, tensor in tensors.items():
            whole = f"{path}.{name}" if path else name
            bits = "a part" if whole in cut else f"bits that sum to {bits_of(tensor)}"
            yield f"'{whole}': {tuple(tensor.shape)} {tensor.dtype}, {bits}"


def _compare(group: dist.ProcessGroup, lines: list[str], timeout: float) -> None:
    _refuse_differences(Communicator(group, timeout=timeout).gather_objects(lines), "tensor")


def _refuse_differences(said: list[list[str]], axis: str) -> None:
    """Raise `RanksDisagree` at the first line that is not the same on all ranks of an axis."""
    for everyone in zip_longest(*said, fillvalue="nothing"):
        if len(set(everyone)) > 1:
            listed = "; ".join(f"rank {rank} has {line}" for rank, line in enumerate(everyone))
            raise RanksDisagree(f"parallelize: the {axis} ranks begin with different plans or models: {listed}. Give all of "
                                f"them one plan, and build the model from one seed or one checkpoint")


def _convert(model: nn.Module, matches: list[Match], group: dist.ProcessGroup, sequence_dim: int | None,
             taken: Taken) -> None:
    """Put what the kinds make of modules in their places."""
    regions: dict[str, tuple[Region, RankLocalRng]] = {}
    done: dict[nn.Module, tuple[Match, nn.Module]] = {}
    for match in matches:
        if match.module not in done:
            around = [known for path, known in regions.items() if match.path.startswith(f"{path}.")]
            streams = [streams for region, streams in around if region.dropout]
            if isinstance(match.kind, Region):
                streams.append(RankLocalRng(Apart(dist.get_rank(group))))
                regions[match.path] = match.kind, streams[-1]
            site = Site(group=group, sequence_dim=sequence_dim, taken=taken, path=match.path,
                        streams=streams[-1] if streams else None,
                        entered=any(region.enter is not None for region, _ in around))
            done[match.module] = match, _converted(match, site)
        first, made = done[match.module]
        if first.kind != match.kind:
            raise UsageError(f"{first.path} and {match.path} are one module, and the plan does two things with it: "
                             f"{first.kind} and {match.kind}")
        if made is not match.module:
            parent, _, name = match.path.rpartition(".")
            setattr(model.get_submodule(parent), name, made)


def _converted(match: Match, site: Site) -> nn.Module:
    if isinstance(match.module, SlicedModule):
        raise UsageError(f"{match.path}: {type(match.module).__name__} is cut already; parallelize a model once")
    try:
        return match.kind.convert(match.module, site)
    except UsageError as error:
        raise UsageError(f"{match.path}: {error}") from error


def _settle(model: nn.Module, matches: list[Match], taken: Taken) -> None:
    """Tie to the parts what was tied to the whole parameters."""
    follows = {match.module: match.kind.follows for match in matches if isinstance(match.kind, Whole)}
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in taken.parts:
                continue
            if name not in follows.get(module, ()):
                raise UsageError(f"{path}.{name} is tied to a parameter that is cut, and {type(module).__name__} is not: "
                                 f"cut it alike, untie it, or if it only holds it: Whole(follows=({name!r},))")
            setattr(module, name, taken.parts[parameter][1])
