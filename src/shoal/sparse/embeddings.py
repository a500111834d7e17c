"""Embeddings with sparse gradients: those built with `sparse=True`; and the options that are refused for them.

Autograd gives the rows that were looked up as a COO tensor, instead of a dense gradient of the whole table. A weight that
another module uses too, such as a tied head, also receives a dense gradient, and the sum of both is dense.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.log import warn_once

__all__ = ["Embeddings", "check_embeddings", "has_sparse_gradient", "lookup_indices", "no_sparse_embedding_error",
           "sparse_weights"]

Embeddings = (nn.Embedding, nn.EmbeddingBag)
"""The modules that can have sparse gradients."""

OUR_HOOKS = 4
"""Hooks of this library on the module of a unit whose weights come and go: two forward pre-hooks and two forward hooks."""

LARGE = 1 << 18
"""Elements from which an embedding with dense gradients is warned of."""


def has_sparse_gradient(module: nn.Module) -> bool:
    """Whether autograd gives a sparse gradient for the module's weight."""
    return isinstance(module, Embeddings) and module.sparse


def lookup_indices(module: nn.Module, args: object) -> Tensor | None:
    """Return the indices of the rows that a call of `module` reads; None if it might read others.

    They are known for the forward of torch's own modules, called with positional arguments, and without the user's hooks:
    a hook might read any row.
    """
    hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)  # pyright: ignore  no public accessor
    if type(module) not in Embeddings or hooks > OUR_HOOKS or not isinstance(args, tuple) or not args:
        return None
    indices: object = args[0]
    return indices if isinstance(indices, Tensor) else None


def sparse_weights(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the weights used only by embeddings with sparse gradients, and the first name of each."""
    used: dict[nn.Parameter, str] = {}
    shared: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if has_sparse_gradient(module):
                used.setdefault(parameter, f"{path}.{name}" if path else name)
            else:
                shared.add(parameter)
    return {parameter: name for parameter, name in used.items() if parameter not in shared}


def check_embeddings(model: nn.Module) -> Iterator[str]:
    """Yield the paths of sparse embeddings; warn of large dense ones. Raises `UsageError` for refused options."""
    sparse = sparse_weights(model)
    for path, module in model.named_modules():
        if not isinstance(module, Embeddings) or not module.weight.requires_grad:
            continue
        kind = f"{type(module).__name__}({', '.join(map(str, module.weight.shape))})"
        if not module.sparse:
            if module.weight.numel() >= LARGE:
                warn_once(f"sparse_gradients: embedding '{path}', {kind}, has dense gradients, which are reduced whole; "
                          f"build it with sparse=True to exchange only the rows that a step touches")
            continue
        _refuse(path, kind, module)
        yield path
        if module.weight not in sparse:
            warn_once(f"sparse_gradients: embedding '{path}', {kind}, shares its weight with a module that has dense "
                      f"gradients, so that their sum is dense and reduced whole. Untie them to exchange rows")


def _refuse(path: str, kind: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.max_norm is not None:
        raise UsageError(f"sparse_gradients: embedding '{path}', {kind}, has max_norm={module.max_norm:g}, which "
                         f"rewrites the rows that a rank looks up in that rank's copy of the weights only: the copies "
                         f"diverge, and masters are not updated. Leave max_norm out, and bound the rows in the forward: "
                         f"rows * (max_norm / rows.norm(dim=-1, keepdim=True)).clamp(max=1)")
    if module.scale_grad_by_freq:
        raise UsageError(f"sparse_gradients: embedding '{path}', {kind}, has scale_grad_by_freq=True, which torch does "
                         f"not support for sparse gradients, and which would count each rank's batch alone; leave it out, "
                         f"or build the embedding with sparse=False and set sparse_gradients to false")
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        raise UsageError(f"sparse_gradients: embedding '{path}', {kind}, has mode='max', for which torch has no sparse "
                         f"gradients; use 'sum' or 'mean', or sparse=False")


def no_sparse_embedding_error(model: nn.Module) -> UsageError:
    """Return the error for `sparse_gradients: true` on a model without a sparse embedding."""
    dense = [f"'{path}' ({', '.join(map(str, module.weight.shape))})" for path, module in model.named_modules()
             if isinstance(module, Embeddings) and module.weight.requires_grad]
    none = "the model has no trainable nn.Embedding or nn.EmbeddingBag"
    fix = f"build {', '.join(dense[:5])} with sparse=True" if dense else none
    return UsageError(f"sparse_gradients: got true, but no embedding of the model has sparse gradients: "
                      f"{fix}, or set it to false")
