"""A released parameter keeps its identity, shape and dtype; reading its data asks the owner first.

While a parameter has no memory its class is a subclass that looks at every operation: metadata passes, data goes to the
owner, who either brings the memory back (the operation then runs as usual) or raises. Reading a tensor whose storage was
emptied kills the process, and one whose pages are gone reads as zeros. A parameter that is gathered has its own class,
and costs nothing.

`detach()` and `.data` are metadata until their values are read, so that `module.state_dict()` names everything that it would
name in plain PyTorch: where the owner would raise they return a `DetachedParameter`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.device import CONVERSIONS
from shoal.errors import ReleasedError, UsageError
from shoal.zero.compiled import opaque
from shoal.zero.grad_attribute import hide_grads, note_answering, read_grad, write_grad
from shoal.zero.ownership import owner_of

_guarded: dict[type, type] = {}

_METADATA = ("shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim", "layout", "name",
             "is_sparse", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_quantized", "is_mkldnn", "is_nested",
             "is_sparse_csr", "itemsize", "nbytes", "output_nr", "retains_grad", "_version", "_backward_hooks",
             "_post_accumulate_grad_hooks")
_METHODS = ("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
            "is_contiguous", "is_signed", "storage_offset", "__hash__", "get_device", "is_inference", "__len__",
            "is_same_size")
_CREATION = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
_OF_LEAVES = ("requires_grad_", "register_hook", "retain_grad", "register_post_accumulate_grad_hook", "is_shared",
              "_is_view")

_READS_METADATA: frozenset[Callable[..., Any]] = frozenset({
    *(getattr(torch.Tensor, name) for name in _METHODS), *(getattr(torch.Tensor, name).__get__ for name in _METADATA),
    torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size,
    cast("Any", torch)._has_compatible_shallow_copy_type})
_CREATES_LIKE: frozenset[Callable[..., Any]] = frozenset({
    *(getattr(torch.Tensor, name) for name in _CREATION), torch.empty_like, torch.zeros_like, torch.ones_like,
    torch.full_like, torch.rand_like, torch.randn_like})
"""Functions that make a tensor of the shape, the dtype and the device of another one, whose values they do not read."""
_PERMITTED = _READS_METADATA | _CREATES_LIKE | {
    *(getattr(torch.Tensor, name) for name in _OF_LEAVES),
    *(descriptor.__set__ for name in _METADATA if hasattr(descriptor := getattr(torch.Tensor, name), "__set__"))}
_ACCESSES_GRAD = frozenset({cast("Any", torch.Tensor.grad).__get__, cast("Any", torch.Tensor.grad).__set__})
_RUNS_BACKWARD: frozenset[Callable[..., Any]] = frozenset({torch.Tensor.backward, torch.autograd.backward})
"""They accumulate into `inputs`, whose values they do not read."""
_DETACHES: frozenset[Callable[..., Any]] = frozenset({torch.Tensor.detach, torch.detach,
                                                      cast("Any", torch.Tensor.data).__get__})
_SETS_DATA = cast("Any", torch.Tensor.data).__set__
_CONVERTS: frozenset[Callable[..., Any]] = frozenset({
    getattr(torch.Tensor, name) for name in CONVERSIONS if hasattr(torch.Tensor, name)})
_STORAGES: frozenset[Callable[..., Any]] = frozenset({torch.Tensor.untyped_storage, torch.Tensor.storage})


@opaque
def _torch_function(cls: type, function: Callable[..., Any], types: tuple[type, ...],
                    args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    kwargs = kwargs or {}
    if function in _DETACHES and is_guarded(args[0]):
        owner = owner_of(args[0])
        if owner is not None and not owner.serves_reads:
            return DetachedParameter(args[0])
    if _changes_nothing(function, args, kwargs) or (function is torch.Tensor.copy_ and _copies_at_rest(*args)):
        return args[0]
    if function in _ACCESSES_GRAD:
        return read_grad(args[0]) if len(args) == 1 else write_grad(*args)
    if function is torch.autograd.grad:
        return _gradients(*args, **kwargs)
    if function in _RUNS_BACKWARD and kwargs.get("inputs") is not None:
        kwargs = {**kwargs, "inputs": _edges(kwargs["inputs"])}
    if function not in _PERMITTED:
        args, kwargs = _operands_with_values(function, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]  the documented way out
        return function(*args, **kwargs)


def _changes_nothing(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this converts a parameter to the dtype and device it has, or sets its data to itself, as `module.to` does."""
    if function == _SETS_DATA:
        return args[0] is args[1]
    if function not in _CONVERTS or not is_guarded(args[0]) or "memory_format" in kwargs:
        return False
    probe = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    return function(probe, *args[1:], **kwargs) is probe


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", str(function))
    if name == "__get__":  # a property: its own name says more
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return name


def _copies_at_rest(target: torch.Tensor, source: torch.Tensor | None = None, *_: object) -> bool:
    """Copy one released parameter to another as they rest, if their owners can, and say whether it is done.

    Either may be the parameter, or what it detached to. What autograd would record, or refuse, is not.
    """
    to, of = (each.parameter if isinstance(each, DetachedParameter) else each for each in (target, source))
    if not isinstance(of, nn.Parameter) or not isinstance(to, nn.Parameter) or not (is_guarded(to) and is_guarded(of)):
        return False
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (target, source)):
        return False
    owner = owner_of(to)
    return owner is not None and owner.copy_at_rest(to, of)


def _operands_with_values(function: Callable[..., Any], args: tuple[Any, ...],
                          kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Bring back the values of all released operands of `function`, and put parameters in place of what they detached to."""
    operands = [leaf.parameter if isinstance(leaf, DetachedParameter) else leaf
                for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    for operand in operands:
        if is_guarded(operand) and function not in _CREATES_LIKE:
            _read(cast("nn.Parameter", operand), _name_of(function), operands)

    def values(detached: DetachedParameter) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            return detached.parameter.detach()

    return cast("tuple[tuple[Any, ...], dict[str, Any]]", tree_map_only(DetachedParameter, values, (args, kwargs)))


def _read(parameter: nn.Parameter, name: str, operands: Sequence[torch.Tensor]) -> None:
    """Have the owner bring back the values of a guarded parameter, which the operation `name` reads beside `operands`."""
    owner = owner_of(parameter)
    if owner is None:
        raise ReleasedError(f"'{name}' read a sharded parameter {tuple(parameter.shape)} whose engine is gone "
                            f"without giving it back: build the model again. Engines give it back by destroy(), "
                            f"not when they are dropped, or when initialize failed on this rank alone")
    owner.read(parameter, name, operands)


class ReleasedStorage:
    """The identity of the storage of a parameter without memory: equal for tied names, and no bytes."""

    def __init__(self, parameter: nn.Parameter):
        self._parameter = parameter

    def data_ptr(self) -> int:
        """Return a number of this parameter alone, which is no address."""
        return id(self._parameter)

    def nbytes(self) -> int:
        """Return the bytes of the parameter's values."""
        return self._parameter.numel() * self._parameter.element_size()

    size = nbytes

    def __getattr__(self, name: str) -> Any:
        _read(self._parameter, name, ())
        return getattr(self._parameter.untyped_storage(), name)


class DetachedParameter(torch.Tensor):
    """`parameter.detach()` of a parameter without memory: the metadata, and the values whenever the parameter is gathered.

    Reading the values while it is released asks the owner, as reading the parameter does.
    """

    parameter: nn.Parameter
    """Whose values it has."""

    @staticmethod
    def __new__(cls: type[DetachedParameter], parameter: nn.Parameter) -> DetachedParameter:
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            detached = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportPrivateUsage]
                cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device)
            detached.parameter = parameter
            return detached

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if func in _DETACHES:
            return args[0]
        if func in _STORAGES and is_guarded(args[0].parameter):
            return ReleasedStorage(args[0].parameter)
        if func is torch.Tensor.copy_ and _copies_at_rest(*args):
            return args[0]
        if func in _READS_METADATA:
            with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
                return func(*args, **(kwargs or {}))
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        found, named = _operands_with_values(func, args, kwargs or {})
        return func(*found, **named)

    def __repr__(self, **_: object) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"DetachedParameter(shape={tuple(self.shape)}, dtype={self.dtype})"


def _gradients(outputs: Any, inputs: Any, **options: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients with respect to parameters that are released: they need no values, and backward reads some."""
    zeros = options.pop("materialize_grads", False)
    options["allow_unused"] = options.get("allow_unused") or zeros
    found = cast("tuple[torch.Tensor | None, ...]", torch.autograd.grad(outputs, _edges(inputs), **options))
    if not zeros:
        return found
    return tuple(torch.zeros(each.shape, dtype=each.dtype, device=each.device) if gradient is None else gradient
                 for gradient, each in zip(found, _listed(inputs), strict=True))


def _edges(inputs: Any) -> list[Any]:
    """Return inputs of autograd with where gradients accumulate in place of released parameters."""
    return [gradient_edge(each) if isinstance(each, torch.Tensor) and is_guarded(each) else each for each in _listed(inputs)]


def _listed(inputs: Any) -> Any:
    return [inputs] if isinstance(inputs, torch.Tensor | GradientEdge) else inputs


def _describe(parameter: nn.Parameter, **_: object) -> str:
    return f"Parameter(released, shape={tuple(parameter.shape)}, dtype={parameter.dtype})"


def _deepcopy(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """Copy the parameter as its owner does, or what the owner brings as a plain parameter."""
    owner = owner_of(parameter)
    if owner is not None:
        copied = owner.copy(parameter)
        if copied is not None:
            memo[id(parameter)] = copied
            return copied
        owner.read(parameter, "deepcopy")
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        plain = type(parameter).__mro__[1] if is_guarded(parameter) else type(parameter)
        return cast("nn.Parameter", plain.__deepcopy__(parameter, memo))


def is_guarded(tensor: torch.Tensor) -> bool:
    """Whether the data of `tensor` is guarded at present."""
    return type(tensor) in _guarded.values()


def gradient_edge(parameter: torch.Tensor) -> GradientEdge:
    """Return where autograd accumulates the gradient of `parameter`, which may be released."""
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        return get_gradient_edge(parameter)


def hooks_of_gradient(parameter: torch.Tensor) -> dict[int, object]:
    """Return the hooks that run when autograd has accumulated the gradient of `parameter`, in their order."""
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        return cast("Any", parameter)._post_accumulate_grad_hooks


def guard(parameter: nn.Parameter) -> None:
    """Send every later read of the parameter's data to its owner."""
    hide_grads((parameter,))
    plain = type(parameter)
    if plain in _guarded.values():
        return
    if plain not in _guarded:
        _guarded[plain] = type("Released" + plain.__name__, (plain,), {
            "__torch_function__": classmethod(_torch_function), "__repr__": _describe, "__deepcopy__": _deepcopy,
            "__module__": __name__})
        note_answering(_guarded[plain])
    parameter.__class__ = _guarded[plain]


def unguard(parameter: nn.Parameter) -> None:
    """Give the parameter its own class back."""
    if is_guarded(parameter):
        parameter.__class__ = type(parameter).__mro__[1]


def released_error(what: str, rank: int, ranks: int) -> ReleasedError:
    """Return the error for `what`, an access to the data of a released parameter."""
    return ReleasedError(
        f"rank {rank}: {what}, which is sharded over {ranks} ranks and released at present. Outside the engine's forward, "
        f"gather it first, on every rank: `with shoal.gathered(parameter): ...` (add modifier_rank=0 to keep what you "
        f"write). For all weights at once: engine.consolidated_state_dict()")


def stepped_error(unit: str, rank: int) -> UsageError:
    """Return the error for a read of weights that backward has already stepped."""
    return UsageError(
        f"rank {rank}: the weights of unit '{unit}' were asked for after backward stepped them, and before engine.step(), "
        f"which comes first. If backward itself reads them again (detached weights, re-entrant recompute of a part of a "
        f"block), set offload_optimizer.step_in_backward to false")
