"""Build a model without ever holding the whole of it: each parameter is sharded as soon as its module is built.

The constructors run as they are, on every rank, with the same random numbers as without the context; what rank 0 drew
counts. Parameters that no unit holds (partition.py) stay whole. A parameter that is written again later, by `nn.init` or
`Module.apply` within the context, is gathered for that operation and sharded again. `initialize` then takes the slices over
into its units, one unit at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from shoal.config.load import read
from shoal.config.problem import raise_all
from shoal.config.resolve import resolve
from shoal.config.section import Section
from shoal.device import HOST, current_device
from shoal.errors import ConfigError, UsageError
from shoal.mesh.parameter_groups import ReplicaGroup
from shoal.tier import Store, trim
from shoal.tier.settings import AioSettings, OffloadParam
from shoal.tier.store import open_store
from shoal.transport import process_group
from shoal.transport.collectives import Communicator
from shoal.zero.guard import is_guarded
from shoal.zero.other_memory import take_over
from shoal.zero.ownership import owner_of
from shoal.zero.partition import has_unit
from shoal.zero.placement import STAGES
from shoal.zero.settings import ZeroSettings
from shoal.zero.unit import Unit
from shoal.zero.unit_state import Member, Scope

DEFAULT_TIMEOUT = 600.0
"""Seconds that a collective may take, as in the configuration's `timeout`."""

TRIM_EVERY = 16 << 20
"""Bytes of whole parameters after whose sharding the heap is trimmed."""


_ON_DEVICE = ("cuda",)
"""Published values of `remote_device` that mean the compute device, of whatever kind it is."""

_entered: list[Init] = []
"""The contexts that are open, the innermost last."""


def is_building_sharded() -> bool:
    """Whether modules are built within an `Init` at present, where all ranks must build the same ones."""
    return bool(_entered)


class Init:
    """Context in which modules are built sharded; with `module=`, shard one that exists, at once.

    `dtype` rounds the parameters as they are sharded; by default they keep theirs, so that masters are exact. `config`
    (or `config_dict_or_path`) is read for `timeout`, `zero_optimization.offload_param` and `aio`: with the device `nvme`
    (or `remote_device="nvme"`) the shards wait on disk, so that a model larger than memory can be built. With `enabled`
    false nothing happens. The other keywords are those of the published API that ask for what happens here anyway.
    """

    def __init__(self, module: nn.Module | None = None, data_parallel_group: dist.ProcessGroup | None = None,
                 mem_efficient_linear: bool = True, remote_device: str | None = None, pin_memory: bool = False,
                 config_dict_or_path: Mapping[str, Any] | str | None = None,
                 config: Mapping[str, Any] | str | None = None, enabled: bool = True, dtype: torch.dtype | None = None,
                 mpu: Any = None):
        if mpu is not None:
            raise UsageError("zero.Init: mpu is not supported yet; leave it out")
        self._enabled = enabled
        self._dtype = dtype
        self._group = data_parallel_group
        self._scope = Scope()
        self._scope.open(self)
        self._handles: list[RemovableHandle] = []
        self._pending: list[nn.Parameter] = []
        self._building: nn.Module | None = None
        self._opened: list[Unit] = []
        given = config if config is not None else config_dict_or_path
        self._settings = {} if given is None else read(given)
        self._timeout = _timeout(self._settings)
        self._offload, self._aio = _offload(self._settings, remote_device)
        self._store: Store | None = None
        self._communicator: Communicator | None = None
        self._freed = 0  # bytes of whole parameters since the last trim
        if enabled and module is not None:
            self._pending = list(module.parameters())
            self._start()
            self._shard_pending()

    def __enter__(self) -> Self:
        if self._enabled:
            self._start()
            _entered.append(self)
            self._handles = [register_module_parameter_registration_hook(self._parameter_registered),
                             register_module_module_registration_hook(self._module_registered)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._enabled:
            _entered.remove(self)
        while self._handles:
            self._handles.pop().remove()
        if kind is None and self._enabled:
            self._shard_pending()
        self._scope.close(self)

    def open(self, unit: Unit, operands: Sequence[Tensor]) -> None:
        """Gather a unit for one operation; the next event shards it again with what the operation wrote.

        Units whose memory the other `operands` of the operation use stay gathered.
        """
        self._close_opened(operands)
        unit.gather()
        self._opened.append(unit)

    def _start(self) -> None:
        process_group.init_distributed()
        group = self._group or dist.group.WORLD
        assert group is not None
        self._communicator = Communicator(group, timeout=self._timeout)
        self._store = open_store(self._offload, self._aio, process_group.device(), rank=self._communicator.rank)

    def _parameter_registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if module is not self._building:
            self._shard_pending()
            self._building = module
        if parameter is not None and owner_of(parameter) is None:
            self._pending.append(parameter)

    def _module_registered(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        self._shard_pending()

    def _shard_pending(self) -> None:
        """Shard what was registered since the last time, and what was opened."""
        self._close_opened()
        pending, self._pending = self._pending, []
        for parameter in pending:
            if owner_of(parameter) is None and parameter.device.type != "meta" and has_unit(parameter):
                self._shard(parameter)
                self._freed += parameter.numel() * parameter.element_size()
        if self._freed > TRIM_EVERY:
            trim()
            self._freed = 0

    def _close_opened(self, operands: Sequence[Tensor] = ()) -> None:
        """Shard what was opened, as rank 0 wrote it, but for units whose memory one of `operands` uses."""
        for unit in tuple(self._opened):
            memories = (unit.full, *(member.parameter for member in unit.members))  # a script may have replaced theirs
            if not any(_is_part(operand, memory) for operand in operands for memory in memories):
                self._opened.remove(unit)
                take_over(unit, keep=False)
                unit.broadcast_edit(0)
                unit.release()

    def copy(self, parameter: nn.Parameter, source: Unit) -> nn.Parameter:
        """Return a copy of a released parameter, whose shard on this rank is that of `source`: nothing is sent."""
        plain = type(parameter).__mro__[1]  # the class that the guarded one extends
        memory = torch.empty((), dtype=parameter.dtype, device=source.full.device).expand(parameter.shape)  # of one number
        copied = plain(memory, parameter.requires_grad)
        source.bring_shard()
        try:
            self._unit(copied, parameter.dtype).load_full(source.full)
        finally:
            source.release()
        return copied

    def _shard(self, parameter: nn.Parameter) -> None:
        assert self._communicator is not None
        unit = self._unit(parameter, self._dtype if self._dtype is not None and parameter.is_floating_point()
                          else parameter.dtype)
        values = torch.zeros(unit.layout.size, dtype=parameter.dtype, device=unit.full.device)
        values[:parameter.numel()].copy_(parameter.detach().reshape(-1))
        self._communicator.broadcast(values, 0, unit.name)
        unit.load_full(values)

    def _unit(self, parameter: nn.Parameter, dtype: torch.dtype) -> Unit:
        assert self._communicator is not None and self._store is not None
        name = f"a parameter {tuple(parameter.shape)} under zero.Init"
        unit = _TemporaryUnit(name, (Member(name=name, parameter=parameter),), STAGES[3],
                              ReplicaGroup(self._communicator, self._communicator.ranks), dtype, process_group.device(),
                              self._scope, self._store)
        unit.session = self
        return unit


class _TemporaryUnit(Unit):
    """One parameter between its constructor and `initialize`, which keeps its slices alive."""

    session: Init
    temporary = True

    @property
    def serves_reads(self) -> bool:
        """False: each operation gathers by itself, and a tensor from `detach` would not stay valid."""
        return False

    def read(self, parameter: nn.Parameter, operation: str, operands: Sequence[Tensor] = ()) -> None:
        if self._scope.is_open:
            self.session.open(self, operands)
        else:
            super().read(parameter, operation, operands)

    def copy(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a copy that is sharded alike, and released: every rank makes it."""
        return self.session.copy(parameter, self)

    @torch.no_grad()
    def copy_at_rest(self, parameter: nn.Parameter, source: nn.Parameter) -> bool:
        """Copy this rank's shard: every rank copies its own, and nothing is sent."""
        other = owner_of(source)
        if other is self:
            return True
        if not isinstance(other, _TemporaryUnit) or not (self.is_released and other.is_released):
            return False
        if other.layout != self.layout or other.communicator.members != self.communicator.members:
            return False
        rest = slice(self.resting_range.start, self.resting_range.stop)
        self.bring_shard()
        try:
            other.bring_shard()
            try:
                self.full[rest].copy_(other.full[rest])
                self.memory.mark_dirty()
            finally:
                other.release()
        finally:
            self.release()
        return True


def _is_part(tensor: Tensor, memory: Tensor) -> bool:
    """Whether `tensor` lies in the storage of `memory`. A subclass of tensors may have a storage without an address."""
    return (not is_guarded(tensor) and tensor.layout is torch.strided
            and torch._C._is_alias_of(tensor, memory))  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def _timeout(config: Mapping[str, Any]) -> float:
    """Return the seconds that `config` gives to collectives; what else is wrong with it, `initialize` says."""
    found = config.get("timeout", DEFAULT_TIMEOUT)
    if isinstance(found, bool) or not isinstance(found, int | float) or found <= 0:
        raise ConfigError(f"zero.Init: timeout: got {found!r}; it must be a number of seconds above 0")
    return float(found)


class _InitSettings(Section):
    """The sections that say where parameters rest until `initialize` takes them over."""

    zero_optimization: ZeroSettings = ZeroSettings()
    """Its `offload_param`."""

    aio: AioSettings = AioSettings()
    """How files are read and written."""


def _offload(config: Mapping[str, Any], remote_device: str | None) -> tuple[OffloadParam, AioSettings]:
    """Return where parameters rest: on `remote_device`, or as `config` says for weights."""
    found = resolve(_InitSettings, {key: config[key] for key in _InitSettings.model_fields
                                    if isinstance(config.get(key), Mapping)})
    raise_all(found.findings.problems, "zero.Init")
    param = found.section.zero_optimization.offload_param
    if remote_device is not None:
        on_device = remote_device != HOST.type and remote_device in (*_ON_DEVICE, current_device().type)
        device = "none" if on_device else remote_device
        asked = resolve(OffloadParam, {**param.model_dump(), "device": device})
        raise_all(asked.findings.problems, "zero.Init: remote_device")
        param = asked.section
    return param, found.section.aio
