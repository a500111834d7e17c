"""Which embeddings give their gradient as rows: those made with `sparse=True`, and what cannot be right for them.

Autograd then hands over the rows that were looked up, with their numbers (a COO tensor), in place of a gradient of the
whole table. A weight that something else uses too, such as a head, receives a dense gradient from there: dense and
sparse addends are a dense sum.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.log import warn_once

__all__ = ["Embeddings", "check_embeddings", "gives_rows", "looked_up", "no_rows_error", "row_weights"]

Embeddings = (nn.Embedding, nn.EmbeddingBag)
"""The modules that can give rows."""

OUR_HOOKS = 2
"""On the module of a unit: one before its forward, and one after."""

LARGE = 1 << 18
"""Elements from which an embedding that gives dense gradients is worth a word."""


def gives_rows(module: nn.Module) -> bool:
    """Whether the gradient of the module's weight is rows."""
    return isinstance(module, Embeddings) and module.sparse


def looked_up(module: nn.Module, args: object) -> Tensor | None:
    """Return the numbers of the only rows that a call of `module` reads, where that is certain.

    That is so in the plain modules' own forward, called by position, with no hooks beside ours: one may read any row.
    """
    hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)  # pyright: ignore  there is no public question
    if type(module) not in Embeddings or hooks > OUR_HOOKS or not isinstance(args, tuple) or not args:
        return None
    numbers: object = args[0]
    return numbers if isinstance(numbers, Tensor) else None


def row_weights(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the weights that only embeddings which give rows use, under their first names."""
    used: dict[nn.Parameter, str] = {}
    shared: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if gives_rows(module):
                used.setdefault(parameter, f"{path}.{name}" if path else name)
            else:
                shared.add(parameter)
    return {parameter: name for parameter, name in used.items() if parameter not in shared}


def check_embeddings(model: nn.Module) -> Iterator[str]:
    """Yield the embeddings made to give rows, and warn of others. Raises `UsageError` for what cannot be right."""
    rows = row_weights(model)
    for path, module in model.named_modules():
        if not isinstance(module, Embeddings) or not module.weight.requires_grad:
            continue
        kind = f"{type(module).__name__}({', '.join(map(str, module.weight.shape))})"
        if not module.sparse:
            if module.weight.numel() >= LARGE:
                warn_once(f"sparse_gradients: embedding '{path}', {kind}, gives dense gradients, which travel whole; build "
                          f"it with sparse=True to exchange only the rows that a step touches")
            continue
        _refuse(path, kind, module)
        yield path
        if module.weight not in rows:
            warn_once(f"sparse_gradients: embedding '{path}', {kind}, shares its weight with a module that gives dense "
                      f"gradients, and their sum is dense: it travels whole. Untie them to exchange rows")


def _refuse(path: str, kind: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.max_norm is not None:
        raise UsageError(f"sparse_gradients: embedding '{path}', {kind}, has max_norm={module.max_norm:g}, which rewrites "
                         f"the rows that a rank looks up in that rank's copy of the weights alone: copies drift apart, and "
                         f"masters never learn of it. Leave max_norm out, and bound the rows in the forward instead: "
                         f"rows * (max_norm / rows.norm(dim=-1, keepdim=True)).clamp(max=1)")
    if module.scale_grad_by_freq:
        raise UsageError(f"sparse_gradients: embedding '{path}', {kind}, has scale_grad_by_freq=True, which torch has not "
                         f"for gradients of rows, and which would count each rank's batch alone; leave it out, or build the "
                         f"embedding with sparse=False and set sparse_gradients to false")
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        raise UsageError(f"sparse_gradients: embedding '{path}', {kind}, has mode='max', for which torch has no gradients "
                         f"of rows; use 'sum' or 'mean', or sparse=False")


def no_rows_error(model: nn.Module) -> UsageError:
    """Return what to raise when `sparse_gradients` is on and no embedding gives rows."""
    dense = [f"'{path}' ({', '.join(map(str, module.weight.shape))})" for path, module in model.named_modules()
             if isinstance(module, Embeddings) and module.weight.requires_grad]
    none = "the model has no trainable nn.Embedding or nn.EmbeddingBag"
    fix = f"build {', '.join(dense[:5])} with sparse=True" if dense else none
    return UsageError(f"sparse_gradients: got true, and no embedding of the model gives sparse gradients: "
                      f"{fix}, or set it to false")
