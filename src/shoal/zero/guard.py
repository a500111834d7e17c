"""A released parameter keeps its identity, shape and dtype; reading its data asks the owner first.

While a parameter has no memory its class is a subclass that looks at every operation: metadata passes, data goes to the
owner, who either brings the memory back (the operation then runs as usual) or raises. Reading a tensor whose storage was
emptied kills the process, and one whose pages are gone reads as zeros. A parameter that is gathered has its own class,
and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from shoal.errors import ReleasedError, UsageError


class Owner(Protocol):
    """The owner of a parameter's memory."""

    def read(self, parameter: nn.Parameter, operation: str) -> None:
        """Bring back the memory of `parameter`, or raise."""
        ...

    def close(self) -> None:
        """Give up the resting state: the parameters have another owner."""
        ...


_owners = WeakIdKeyDictionary()
_kept = WeakIdKeyDictionary()
_guarded: dict[type, type] = {}

_METADATA = ("shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim", "layout", "name",
             "is_sparse", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_quantized", "is_mkldnn", "is_nested",
             "is_sparse_csr", "itemsize", "nbytes", "output_nr", "retains_grad", "_version", "_backward_hooks",
             "_post_accumulate_grad_hooks")
_METHODS = ("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
            "is_contiguous", "is_signed", "storage_offset", "requires_grad_", "register_hook", "retain_grad", "__hash__",
            "register_post_accumulate_grad_hook", "get_device", "is_inference", "is_shared", "__len__",
            "_is_view", "is_same_size")


def _permitted() -> frozenset[Callable[..., Any]]:
    functions: list[Any] = [getattr(torch.Tensor, name) for name in _METHODS]
    for name in _METADATA:
        descriptor = getattr(torch.Tensor, name)
        functions += [descriptor.__get__, descriptor.__set__] if hasattr(descriptor, "__set__") else [descriptor.__get__]
    functions += [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size]
    return frozenset(functions)


_PERMITTED = _permitted()


def _torch_function(cls: type, function: Callable[..., Any], types: tuple[type, ...],
                    args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    kwargs = kwargs or {}
    if function not in _PERMITTED:
        name = getattr(function, "__name__", str(function))
        if name == "__get__":  # a property: its own name says more
            name = getattr(getattr(function, "__self__", None), "__name__", name)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and is_guarded(leaf):
                owner = owner_of(leaf)
                if owner is None:
                    raise ReleasedError(f"'{name}' read a sharded parameter {tuple(leaf.shape)} whose engine is gone "
                                        f"without giving it back: build the model again. Engines give it back by destroy(), "
                                        f"not when they are dropped, or when initialize failed on this rank alone")
                owner.read(cast("nn.Parameter", leaf), name)
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]  the documented way out
        return function(*args, **kwargs)


def _describe(parameter: nn.Parameter, **_: object) -> str:
    return f"Parameter(released, shape={tuple(parameter.shape)}, dtype={parameter.dtype})"


def _deepcopy(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """Copy what the owner brings, as a parameter of its own."""
    owner = owner_of(parameter)
    if owner is not None:
        owner.read(parameter, "deepcopy")
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        plain = type(parameter).__mro__[1] if is_guarded(parameter) else type(parameter)
        return cast("nn.Parameter", plain.__deepcopy__(parameter, memo))


def is_guarded(tensor: torch.Tensor) -> bool:
    """Whether the data of `tensor` is guarded at present."""
    return type(tensor) in _guarded.values()


def set_owner(parameter: nn.Parameter, owner: Owner, *, keep: bool = False) -> None:
    """Record that `owner` holds the memory of `parameter` from now on; with `keep` the parameter keeps it alive.

    An owner that was kept alive so far is told that it is not any more.
    """
    _owners[parameter] = ref(owner)
    former: Owner | None = _kept.pop(parameter, None)
    if former is not None:
        former.close()
    if keep:
        _kept[parameter] = owner


def clear_owner(parameter: nn.Parameter) -> None:
    """Record that the parameter holds its own memory again."""
    _owners.pop(parameter, None)


def guard(parameter: nn.Parameter) -> None:
    """Send every later read of the parameter's data to its owner."""
    plain = type(parameter)
    if plain in _guarded.values():
        return
    if plain not in _guarded:
        _guarded[plain] = type("Released" + plain.__name__, (plain,), {
            "__torch_function__": classmethod(_torch_function), "__repr__": _describe, "__deepcopy__": _deepcopy,
            "__module__": __name__})
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


def owner_of(parameter: torch.Tensor) -> Owner | None:
    """Return the owner of the parameter's memory; None if it owns its memory."""
    reference = cast("ReferenceType[Owner] | None", _owners.get(parameter))
    return None if reference is None else reference()
