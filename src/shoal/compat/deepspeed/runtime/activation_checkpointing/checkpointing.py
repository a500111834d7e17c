"""Activation checkpointing under its published names: recompute by torch, with random numbers restored.

Activations of a checkpoint are kept whole on the device; the options that keep them elsewhere (`partition_activations`,
`checkpoint_in_cpu`, `contiguous_checkpointing`) are accepted with one warning.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction as CheckpointFunction
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from shoal.compat.deepspeed.accelerator.real_accelerator import get_accelerator
from shoal.compat.deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
from shoal.compat.deepspeed.runtime.config import read_config
from shoal.log import warn_once

__all__ = ["CheckpointFunction", "CudaRNGStatesTracker", "checkpoint", "configure", "get_cuda_rng_tracker",
           "is_configured", "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed",
           "non_reentrant_checkpoint", "partition_activations_in_checkpoint", "reset", "set_num_layers"]

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_SEED_OFFSET = 2718
"""Between the seed of the default generator and that of the model-parallel one, as published."""


class _Options:
    """What `configure` was told."""

    def __init__(self) -> None:
        self.configured = False
        self.mpu: Any = None
        self.num_layers: int | None = None
        self.partition_activations = False
        self.contiguous_memory_optimization = False
        self.cpu_checkpointing = False
        self.number_checkpoints: int | None = None
        self.synchronize_checkpoint_boundary = False
        self.profile = False


_options = _Options()


def configure(mpu_: Any, deepspeed_config: Any = None, partition_activations: bool | None = None,
              contiguous_checkpointing: bool | None = None, num_checkpoints: int | None = None,
              checkpoint_in_cpu: bool | None = None, synchronize: bool | None = None, profile: bool | None = None) -> None:
    """Take the options of the block `activation_checkpointing`, and then those of the keywords that are not None.

    Raises `AssertionError` for contiguous memory without partitioning, or without the number of checkpoints.
    """
    options = _Options()
    options.mpu, options.configured = mpu_, True
    if deepspeed_config is not None:
        param_dict = getattr(deepspeed_config, "_param_dict", None)
        block = DeepSpeedActivationCheckpointingConfig(read_config(deepspeed_config) if param_dict is None else param_dict)
        vars(options).update(block.repr())
    given = {"partition_activations": partition_activations, "contiguous_memory_optimization": contiguous_checkpointing,
             "number_checkpoints": num_checkpoints, "cpu_checkpointing": checkpoint_in_cpu,
             "synchronize_checkpoint_boundary": synchronize, "profile": profile}
    vars(options).update({key: value for key, value in given.items() if value is not None})
    if options.contiguous_memory_optimization:
        assert options.partition_activations, "contiguous_checkpointing: needs partition_activations"
        assert options.number_checkpoints is not None, "contiguous_checkpointing: needs num_checkpoints"
    for name in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "profile"):
        if getattr(options, name):
            warn_once(f"activation_checkpointing.{name}: has no effect yet: activations of a checkpoint are kept whole on "
                      f"the device")
    vars(_options).update(vars(options))


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _options.configured


def reset() -> None:
    """Do nothing: no buffers are kept between passes."""


def set_num_layers(nlayers: int) -> None:
    """Keep the number of layers."""
    _options.num_layers = nlayers


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set `partition_activations`."""
    _options.partition_activations = partition_activation


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`; its activations are recomputed in backward, with the same random numbers."""
    return _published(torch_checkpoint(_restoring(function), *args, use_reentrant=False, preserve_rng_state=True, **kwargs))


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Do the same as `checkpoint`, which is not re-entrant either."""
    return checkpoint(function, *args)


def _published(outputs: Any) -> Any:
    """Return several outputs as a tuple, and one by itself."""
    if isinstance(outputs, list):
        outputs = tuple(outputs)
    return outputs[0] if isinstance(outputs, tuple) and len(outputs) == 1 else outputs


def _restoring(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with the named generators in the same states at its recompute as at its first call."""
    first: dict[str, Tensor] | None = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        tracker = get_cuda_rng_tracker()
        if first is None:
            first = tracker.get_states()
            return function(*args, **kwargs)
        present = tracker.get_states()
        tracker.set_states(first)
        try:
            return function(*args, **kwargs)
        finally:
            tracker.set_states(present)

    return run


class CudaRNGStatesTracker:
    """Named generators of random numbers: `with tracker.fork("name"):` draws from one of them."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all generators."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        """Return the state of each generator."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Set the state of each generator."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a generator; raises for a name or a seed that another one has."""
        if seed in self.seeds_:
            raise RuntimeError(f"rng tracker: seed {seed} belongs to another generator; give another one")
        if name in self.states_:
            raise RuntimeError(f"rng tracker: there is a generator '{name}' already; give another name")
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.seeds_.add(seed)
        self.states_[name] = device.get_rng_state()
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Generator[None]:
        """Draw random numbers from the generator `name` within the context; raises if there is none."""
        if name not in self.states_:
            raise RuntimeError(f"rng tracker: there is no generator '{name}'; add it first")
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the tracker of this process."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default generator by `seed`, and the model-parallel one by a number of its own on each tensor rank."""
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + _SEED_OFFSET + _tensor_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the model-parallel generator alone, in place of its present state."""
    device = get_accelerator()
    before = device.get_rng_state()
    device.manual_seed(seed + _SEED_OFFSET + _tensor_rank())
    _tracker.states_[_MODEL_PARALLEL_RNG_TRACKER_NAME] = device.get_rng_state()
    device.set_rng_state(before)


def _tensor_rank() -> int:
    mpu = _options.mpu
    if mpu is None:
        return 0
    find = getattr(mpu, "get_tensor_model_parallel_rank", None) or mpu.get_model_parallel_rank
    return find()

