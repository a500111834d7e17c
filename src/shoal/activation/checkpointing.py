"""`shoal.checkpointing`: backward recomputes the functions that a script names; only their inputs are kept, as configured.

    from shoal import checkpointing
    checkpointing.configure(mpu, partition_activations=True, checkpoint_in_cpu=True)
    hidden = checkpointing.checkpoint(layer, hidden, mask)

    partition_activations           each tensor rank keeps one slice of an input, gathered again for backward
    checkpoint_in_cpu               inputs, or their slices, are copied to page-locked host memory
    contiguous_checkpointing        the copies of one size are parts of one buffer, of `num_checkpoints` of them
    synchronize                     waits for the device before and after a function

The inputs rest by the mechanism of `"activation_checkpointing": {"rest": ...}` (`saved.py`), with an engine or without.
Only floating-point tensors rest, not parameters and not what a script has marked `tensor.no_checkpointing = True`. Recompute
draws the random numbers of the forward, those of the tracker's named states too. That of a module, or of its method, updates
copies of its buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from shoal.activation.random_states import MODEL_PARALLEL, TRACKER, RandomStates, seed_device
from shoal.activation.replay import replayed
from shoal.activation.saved import RestingView, SavedActivations, SliceGather, Slices, version_witness
from shoal.activation.settings import FunctionSettings
from shoal.config.load import Source, read
from shoal.config.problem import join, raise_all, shown
from shoal.config.resolve import resolve
from shoal.device import HOST, can_pin, current_device, synchronize
from shoal.errors import ConfigError, UsageError
from shoal.log import warn_once
from shoal.tier import Memory
from shoal.tier.contiguous import ContiguousMemory
from shoal.transport.collectives import Communicator

__all__ = ["CheckpointingOptions", "checkpoint", "configure", "get_cuda_rng_tracker", "is_configured", "may_rest",
           "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed", "module_of", "non_reentrant_checkpoint",
           "options", "partition_activations_in_checkpoint", "reset", "set_num_layers", "take", "tensor_group"]

_TIMEOUT = 600.0
"""Seconds that a rank waits for the slices of others."""
_SEED_OFFSET = 2718
"""Between the seed of the default generator and that of the model-parallel one, as DeepSpeed and Megatron have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointingOptions:
    """The arguments of `configure`, under the names of the JSON section."""

    configured: bool = False
    mpu: Any = None
    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    number_checkpoints: int | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


_KEYS = frozenset(CheckpointingOptions.__dataclass_fields__) - {"configured", "mpu"}
_KEYWORDS = {"contiguous_memory_optimization": "contiguous_checkpointing", "number_checkpoints": "num_checkpoints",
             "cpu_checkpointing": "checkpoint_in_cpu", "synchronize_checkpoint_boundary": "synchronize"}
"""The keywords of `configure` by their keys in the section, where the two differ."""


class _Process:
    """The options of this process, and where inputs rest by them."""

    def __init__(self) -> None:
        self.options = CheckpointingOptions()
        self.tracker = TRACKER
        self._resting: SavedActivations | None = None

    def set(self, options: CheckpointingOptions) -> None:
        """Take other options; inputs that rest already come back as they were kept."""
        if self._resting is not None:
            self._resting.close()
        self.options, self._resting = options, None

    @property
    def resting(self) -> SavedActivations | None:
        """Where the inputs of functions rest; None where they stay."""
        options, device = self.options, current_device()
        group = tensor_group(options.mpu) if options.partition_activations else None
        moves = options.cpu_checkpointing and device != HOST
        if group is None and not moves:
            return None
        if self._resting is None:
            memory = Memory(device=HOST, pinned=device if can_pin(device) else None) if moves else Memory(device=device)
            store = ContiguousMemory(memory, options.number_checkpoints) if options.number_checkpoints is not None and \
                options.contiguous_memory_optimization else memory
            self._resting = SavedActivations(
                store, device, smallest=1,  # all but the empty tensor that torch saves beside them
                slices=None if group is None else _SlicesOfCalls(Communicator(group, timeout=_TIMEOUT)))
        return self._resting

    def begin(self) -> None:
        """Forget which function was called last."""
        if self._resting is not None:
            self._resting.begin()


_process = _Process()


class _SlicesOfCalls(Slices):
    """The inputs of every recomputed function are sliced; those of the first pass are compared between the ranks."""

    def __init__(self, communicator: Communicator):
        super().__init__(communicator, ())
        self._compares = True

    def __contains__(self, call: object) -> bool:
        return isinstance(call, _Call)

    def own(self, source: Tensor, module: Any) -> Tensor:
        """Return this rank's slice. Raises `UsageError` where the inputs of the ranks differ in the first pass."""
        if self._compares:
            self.compare(source, module.name)
        return self.slice_of(source)

    def gather(self, own: Tensor) -> SliceGather:
        """Start the all-gather of the slices: backward has begun."""
        self._compares = False
        return super().gather(own)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Argument:
    """A tensor among the arguments of a call. Its version tells whether a script has written to it since."""

    path: str
    shape: tuple[int, ...]
    version: int
    witness: Tensor

    @classmethod
    def of(cls, tensor: Tensor, path: str) -> _Argument:
        may_move = type(tensor) is Tensor and tensor.layout is torch.strided  # others stay with the call or with autograd
        return cls(path=path, shape=tuple(tensor.shape), version=tensor._version,
                   witness=version_witness(tensor) if may_move else tensor)

    @property
    def is_written(self) -> bool:
        """Whether the tensor was written to in place after the call."""
        return self.witness._version != self.version


def _arguments(value: Any, path: str) -> Iterator[_Argument]:
    """Yield the tensors within `value`: itself, or those in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        if not value.is_inference():  # it has no version, and can only be written to in inference mode
            yield _Argument.of(value, path)
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _arguments(item, join(path, key))


class _Call:
    """One call of a function: its tensors that may rest are arguments of `run`, and all others stay with it.

    Autograd compares versions of saved tensors only where no hook packs them, so the call compares those of all.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.name = getattr(function, "__name__", type(function).__name__)
        self._arguments = [*_arguments(args, "argument"), *_arguments(kwargs, "argument")]
        self._function, self._kwargs = function, kwargs
        self._places = [place for place, value in enumerate(args) if may_rest(value)]
        self._others = [None if place in self._places else value for place, value in enumerate(args)]

    def run(self, *tensors: Tensor) -> Any:
        """Call the function. Raises `UsageError` in a recompute whose arguments were written to after the call."""
        for each in self._arguments:
            if each.is_written:
                raise UsageError(f"checkpoint: {each.path} of {self.name}, of shape {each.shape}, was written to in place "
                                 f"after the call, so that backward cannot compute the activations of the call again. Give "
                                 f"{self.name} a copy (`tensor.clone()`), or write after backward")
        args = list(self._others)
        for place, tensor in zip(self._places, tensors, strict=True):
            args[place] = tensor
        return self._function(*args, **self._kwargs)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of the call and of its recomputes, which draw the same numbers and update no buffer."""
        module = module_of(self._function)
        return replayed(self.name, [] if module is None else [module])


# CheckpointingOptions


def configure(mpu: Any = None, config: Source | None = None, *, partition_activations: bool | None = None,
              contiguous_checkpointing: bool | None = None, num_checkpoints: int | None = None,
              checkpoint_in_cpu: bool | None = None, synchronize: bool | None = None, profile: bool | None = None) -> None:
    """Take the options of the section `activation_checkpointing` of `config`, then those of the keywords that are not None.

    `mpu` is a `shoal.Mesh` or a Megatron-style object, whose tensor ranks partition. Raises ConfigError for unknown keys and
    values that are not allowed, for a contiguous buffer without `num_checkpoints`, or of inputs that stay where they are.
    """
    if mpu is not None and _query(mpu, "group") is None and _query(mpu, "rank") is None:
        raise ConfigError(f"mpu: got {shown(mpu)}; give a shoal.Mesh, or an object with get_tensor_model_parallel_group() "
                          f"and get_tensor_model_parallel_rank()")
    section = None if config is None else read(config).get("activation_checkpointing")
    if not isinstance(section, dict | None):
        raise ConfigError(f"activation_checkpointing: got {shown(section)}; give a JSON object")
    given: dict[str, Any] = {
        "partition_activations": partition_activations, "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints, "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize, "profile": profile}
    taken = _checked(section or {}, {key: f"activation_checkpointing.{key}" for key in section or {}})
    taken |= _checked({key: value for key, value in given.items() if value is not None}, _KEYWORDS)
    take(CheckpointingOptions(mpu=mpu, configured=True, **taken))


def _checked(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the options among `values`. Raises ConfigError, with the key's name in `names`, where the section would."""
    found = resolve(FunctionSettings, values)
    raise_all([replace(problem, path=names.get(problem.path, problem.path)) for problem in found.findings.problems], None)
    return found.section.model_dump(include=set(_KEYS), exclude_unset=True)


def take(options: CheckpointingOptions) -> None:
    """Take `options` as they are. Raises ConfigError for those that contradict each other."""
    if options.contiguous_memory_optimization:
        if not (options.partition_activations or options.cpu_checkpointing):
            raise ConfigError("contiguous_checkpointing: needs partition_activations or checkpoint_in_cpu: inputs that stay "
                              "where they are have no buffer")
        if options.number_checkpoints is None:
            raise ConfigError("contiguous_checkpointing: needs num_checkpoints, the functions whose inputs rest at once")
    if options.partition_activations and tensor_group(options.mpu) is None:
        warn_once("activation_checkpointing.partition_activations: has no effect without several tensor ranks")
    if options.cpu_checkpointing and current_device() == HOST and not options.partition_activations:
        warn_once("activation_checkpointing: inputs are to rest in host memory, where the model computes: no effect")
    if options.profile:
        warn_once("activation_checkpointing.profile: has no effect; `with engine.trace() as trace` records the phases of a "
                  "step")
    _process.set(options)


def options() -> CheckpointingOptions:
    """Return the present options."""
    return _process.options


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _process.options.configured


def set_num_layers(nlayers: int) -> None:
    """Set the number of functions whose inputs rest at once. Raises UsageError for less than one."""
    if isinstance(nlayers, bool) or not isinstance(nlayers, int) or nlayers < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"checkpointing.set_num_layers: got {nlayers!r}; give the number of recomputed functions, 1 or "
                         f"more")
    _process.set(replace(_process.options, number_checkpoints=nlayers))


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switch the partitioning of inputs over the tensor ranks on or off."""
    _process.set(replace(_process.options, partition_activations=partition_activation))


def reset() -> None:
    """Forget the order of calls: after passes with gradients that no backward follows."""
    _process.begin()


def tensor_group(mpu: Any) -> dist.ProcessGroup | None:
    """Return the group of the tensor ranks of a mesh or a Megatron-style object; None for one rank."""
    group = _ask(mpu, "group")
    return group if group is not None and dist.get_world_size(group) > 1 else None


def _ask(mpu: Any, what: str) -> Any:
    query = _query(mpu, what)
    return None if query is None else query()


def _query(mpu: Any, what: str) -> Callable[[], Any] | None:
    names = ("tensor_model_parallel", "slice_parallel", "model_parallel")
    return next(filter(callable, (getattr(mpu, f"get_{name}_{what}", None) for name in names)), None)


# Recompute


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`, without keeping its activations: backward calls it again.

    The second call draws the random numbers of the first. Backward raises `UsageError` for a tensor among the arguments, or
    in tuples, lists and dicts of them, that was written to in place after the call. (For an argument that may rest and does
    not, autograd raises its own `RuntimeError`.)
    """
    boundary = current_device() if _process.options.synchronize_checkpoint_boundary else HOST
    synchronize(boundary)
    call, resting = _Call(function, args, kwargs), _process.resting
    with _rested(resting, call):
        result = torch_checkpoint(call.run, *filter(may_rest, args), use_reentrant=False, preserve_rng_state=False,
                                  context_fn=call.contexts)
    synchronize(boundary)
    return result


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Do the same as `checkpoint`, which is not re-entrant either."""
    return checkpoint(function, *args)


def may_rest(value: Any) -> bool:
    """Whether `value` is an activation that may rest elsewhere: scripts exclude one by its attribute `no_checkpointing`."""
    return isinstance(value, Tensor) and value.is_floating_point() and not getattr(value, "no_checkpointing", False) \
        and not isinstance(value, nn.Parameter)


def module_of(function: Any) -> nn.Module | None:
    """Return the module that `function` is, or of which it is a method, also with arguments bound to it."""
    function = function.func if isinstance(function, partial) else function
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


@contextmanager
def _rested(resting: SavedActivations | None, call: _Call) -> Generator[None]:
    """Have the inputs that torch's checkpoint saves within the context rest."""
    if resting is None:
        yield
        return

    def pack(tensor: Tensor) -> Tensor | RestingView:
        return resting.pack(tensor, call) or tensor

    def unpack(kept: Tensor | RestingView) -> Tensor:
        return kept.restore() if isinstance(kept, RestingView) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


# Random numbers


def get_cuda_rng_tracker() -> RandomStates:
    """Return the named random states of this process."""
    return _process.tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default generator by `seed`, and the model-parallel one by a number of its own on each tensor rank."""
    _process.tracker.reset()
    seed_device(seed)
    _process.tracker.add(MODEL_PARALLEL, _seed_of_slices(seed))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the model-parallel generator alone, in place of its present state."""
    with _process.tracker.fork():
        seed_device(_seed_of_slices(seed))


def _seed_of_slices(seed: int) -> int:
    return seed + _SEED_OFFSET + int(_ask(_process.options.mpu, "rank") or 0)
