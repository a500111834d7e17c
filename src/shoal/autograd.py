"""Wrappers of torch's private autograd functions: the running backward pass, saved-tensor hooks, hooks of parameters that
keep nothing alive, and second derivatives of autograd functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType, is_legacy_batchedtensor
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  no public name
    _get_current_dispatch_mode_stack,  # pyright: ignore[reportPrivateUsage]  no public name
)
from torch.utils.checkpoint import checkpoint

from shoal.errors import NotServed

__all__ = ["KeepsResults", "at_end_of_backward", "backward_liveness", "check_first_derivative", "differentiable_gradients",
           "graph_task", "in_backward", "in_function_transform", "in_gradient_transform", "in_trace", "is_reached",
           "isolated", "keeps_graph", "kept_result", "needs_operators", "run_backward", "saved_by_checkpoint", "storages",
           "weak_hook", "without_autocast"]

P = ParamSpec("P")
T = TypeVar("T")

_PLAIN = (Tensor, nn.Parameter)
_GRADIENT_TRANSFORMS = (TransformType.Grad, TransformType.Jvp)


def graph_task() -> int:
    """Return autograd's number of the backward pass under way on this thread, -1 for none. A re-entrant pass has its own."""
    return torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]


def in_backward() -> bool:
    """Return whether a backward pass is under way on this thread."""
    return graph_task() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward pass under way ends; never if it fails."""
    Variable._execution_engine.queue_callback(callback)  # pyright: ignore  it has no annotation


def backward_liveness() -> Callable[[], bool]:
    """Return a function that tells whether the backward pass under way on this thread still is.

    Autograd holds the callbacks of a pass until it ends or fails, and no longer.
    """
    def nothing() -> None:
        pass

    at_end_of_backward(nothing)
    held = ref(nothing)
    return lambda: held() is not None


def weak_hook(function: Callable[..., None], *arguments: object) -> Callable[[Tensor], None]:
    """Return a hook of a parameter that calls `function(*arguments, tensor)` while all of `arguments` are alive.

    Python's collector does not see what a hook of a gradient holds. A hook that held an engine, which holds the parameter,
    would keep both in memory for the life of the process.
    """
    held = [ref(argument) for argument in arguments]

    def hook(tensor: Tensor) -> None:
        living = [argument() for argument in held]
        if None not in living:
            function(*living, tensor)

    return hook


def is_reached(node: Any) -> bool:
    """Return whether the backward pass under way leads to `node` of the graph; True where autograd does not tell."""
    try:
        return bool(torch._C._will_engine_execute_node(node))  # pyright: ignore[reportPrivateUsage]
    except RuntimeError:  # torch.autograd.grad is to return the gradient of a leaf
        return True


def saved_by_checkpoint() -> bool:
    """Return whether what autograd saves here goes to torch's non-reentrant checkpoint, which drops and recomputes it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore  it has no annotation
    return hooks is not None and hooks[0].__module__ == checkpoint.__module__


def storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Return where the elements of a tensor are: its storage, or those of the parts of a sparse one; none for oneDNN's."""
    match tensor.layout:
        case torch.sparse_coo:
            parts = [tensor._indices(), tensor._values()]
        case torch.sparse_csr | torch.sparse_bsr:
            parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        case _:
            parts = [] if tensor.is_mkldnn else [tensor]
    return [part.untyped_storage() for part in parts]


@contextmanager
def isolated(device: torch.device) -> Generator[None]:
    """Compute within the context as outside of all others, with gradients, on `device` and the host.

    A probe of kernels may run at the first call of a layer. There a checkpoint or a rest would take the tensors that it
    saves, a selective checkpoint would count its operations, and autocast would change its results.
    """
    with ExitStack() as stack:
        if torch._C._autograd._saved_tensors_hooks_is_enabled():  # pyright: ignore  else there are none
            stack.enter_context(saved_tensors_hooks(_same, _same))
        for kind in sorted({device.type, "cpu"}):
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


def without_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` with autocast disabled, so that its products have the dtypes of their operands."""
    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        device = next(each.device.type for each in args if isinstance(each, Tensor))
        if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run


def _same(tensor: Tensor) -> Tensor:
    return tensor


def in_gradient_transform() -> bool:
    """Return whether the code runs within torch.func.grad, jvp or a transform made of them, whose graph is their own."""
    levels = torch._C._functorch.get_interpreter_stack()  # pyright: ignore  it has no annotation
    return levels is not None and any(level.key() in _GRADIENT_TRANSFORMS for level in levels)


def in_function_transform() -> bool:
    """Return whether the code runs within a transform of torch.func, or in forward-mode differentiation."""
    dual = torch.autograd.forward_ad._current_level  # pyright: ignore  it has no annotation
    return dual >= 0 or torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore  it has no annotation


def in_trace() -> bool:
    """Return whether torch.export, make_fx or torch.jit.trace records the operators that the code calls."""
    graph = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)  # pyright: ignore  it has no annotation
    return (torch.compiler.is_exporting() or graph is not None
            or torch.jit.is_tracing())  # pyright: ignore[reportPrivateImportUsage]  torch documents it


def needs_operators(*tensors: Tensor) -> bool:
    """Return whether code must compute by torch's operators, and not by kernels that take the addresses of `tensors`.

    Others follow the operators there (torch.compile, torch.func, a trace), or a tensor is of a subclass: a DTensor or one of
    FakeTensorMode has no memory of its own. The memory of a lazily negated view has other signs.
    """
    return (torch.compiler.is_compiling() or in_function_transform() or in_trace()
            or any(type(tensor) not in _PLAIN or tensor.is_neg() for tensor in tensors))


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Run a backward pass from `outputs`, whose `gradients` have their shapes; raises what torch's engine raises.

    `torch.autograd.backward` would disable torch function modes during the pass, and spends longer on checking shapes than a
    small pass takes.
    """
    Variable._execution_engine.run_backward(  # pyright: ignore  it has no annotation
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


class KeepsResults(TorchDispatchMode, ABC):
    """A mode that keeps what some computations return, so that one that runs again need not compute it."""

    @abstractmethod
    def of_kernel(self, compute: Callable[[], T]) -> T:
        """Return what `compute` returns: a call of a kernel that is no operator of torch."""


def kept_result(compute: Callable[[], T]) -> T:
    """Return what `compute` returns, by the innermost mode that keeps results, if there is one."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, KeepsResults):
            return mode.of_kernel(compute)
    return compute()


def check_first_derivative(what: str, instead: str, gradient: Tensor | None = None) -> None:
    """Raise `NotServed` in the backward of an autograd function, with create_graph=True, or where `gradient` is several.

    torch's `once_differentiable` raises where the incoming gradient has a graph. Elsewhere, as at the end of a graph, it
    drops what depends on the saved tensors without a word. So it serves linear functions, whose backward needs none.
    """
    if torch.is_grad_enabled():
        raise NotServed(f"{what} has no second derivative, which create_graph=True asks for; {instead}")
    if gradient is not None and is_legacy_batchedtensor(gradient):
        raise NotServed(f"{what} has no backward of several gradients at once, which is_grads_batched=True asks for; "
                        f"{instead}")


def differentiable_gradients(function: Callable[..., Tensor], operands: Sequence[Tensor | None],
                             gradient: Tensor) -> list[Tensor | None]:
    """Return the gradients of `operands` for that of `function(*operands)`, by a graph of torch's operations.

    It is for the backward of an autograd function with create_graph=True, whose saved tensors are the operands.
    """
    aliases = [None if each is None else each.view_as(each) for each in operands]  # one tensor may be two operands
    wanted = [each for each in aliases if each is not None and each.requires_grad]
    if not wanted:
        return [None for _ in aliases]
    found = iter(torch.autograd.grad(function(*aliases), wanted, gradient, create_graph=True))
    return [next(found) if each is not None and each.requires_grad else None for each in aliases]


def keeps_graph() -> bool:
    """Return whether the backward pass under way keeps the graph, so that tensors it has saved are needed again."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # pyright: ignore  it has no annotation
