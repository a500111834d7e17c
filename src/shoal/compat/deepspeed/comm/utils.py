"""Questions of the published collectives about their arguments and their launcher."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shoal.compat.deepspeed.utils.comms_logging import get_caller_func
from shoal.compat.environment import number

__all__ = ["get_debug_log_name", "get_default_args", "get_local_rank_from_launcher", "get_msg_size_from_args",
           "get_tensor_kwarg", "get_tensor_position", "get_world_rank_from_launcher", "get_world_size_from_launcher"]

_TENSORS = ("tensor", "tensors", "input_list", "input_tensor_list")
"""Parameters that hold what a collective sends; the first that a function has counts."""


def get_local_rank_from_launcher() -> int:
    """Return this rank's number on its host, 0 without a launcher."""
    return number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", default=0)


def get_world_rank_from_launcher() -> int:
    """Return this rank's number in the job, 0 without a launcher."""
    return number("RANK", "OMPI_COMM_WORLD_RANK", default=0)


def get_world_size_from_launcher() -> int:
    """Return the number of ranks, 1 without a launcher."""
    return number("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", default=1)


def get_default_args(func: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of a function's parameters, by name."""
    parameters = inspect.signature(func).parameters
    return {name: each.default for name, each in parameters.items() if each.default is not each.empty}


def get_tensor_position(func: Callable[..., Any]) -> int:
    """Return which parameter of `func` is the tensor, -1 if none is."""
    names = list(inspect.signature(func).parameters)
    return next((names.index(name) for name in _TENSORS if name in names), -1)


def get_tensor_kwarg(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the tensor among the keywords of a call of `func`, its defaults included; None if there is none."""
    given = {**get_default_args(func), **kwargs}
    return next((given[name] for name in _TENSORS if name in given), None)


def get_msg_size_from_args(func: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Return the bytes of the tensor in a call of `func`, 0 if there is none."""
    place = get_tensor_position(func)
    found = args[place] if 0 <= place < len(args) else get_tensor_kwarg(func, kwargs)
    tensors: list[Any] = list(found) if isinstance(found, list | tuple) else [found]
    return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, Tensor))


def get_debug_log_name(func_args: Mapping[str, Any], debug: bool) -> str:
    """Return the `log_name` of a call, with `debug` also the function that made it."""
    name = str(func_args["log_name"])
    return f"{name} | [Caller Func: {get_caller_func()}]" if debug else name
