"""Masks as terms of the scores, and which blocks they hide wholly: kernels skip those.

In mode "add" a mask is added to the scores, in mode "mul" its zeros hide them; one of bool hides where it is False, in both.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from shoal.attention.arguments import check_tensor
from shoal.attention.blocks import Blocks
from shoal.attention.call import HIDES, Term
from shoal.device import HOST
from shoal.errors import UsageError
from shoal.log import warn_once

__all__ = ["Mode", "any_hidden", "check_mode", "for_backward", "hidden_blocks", "key_padding_term", "mask_term"]

Mode = Literal["add", "mul"]


def check_mode(name: str, mode: object) -> None:
    """Raise UsageError for what is no mode of the mask `name`."""
    if mode not in ("add", "mul"):
        raise UsageError(f"attend: {name}_mode is 'add' or 'mul'; got {mode!r}")


def mask_term(name: str, tensor: Tensor, mode: Mode, shape: tuple[int, int], device: torch.device, *,
              traced: bool = False) -> Term:
    """Return a mask of `shape`, (batches, kv_length) of "key_padding" or (length, kv_length) of "mask", as a term.

    Raises UsageError for another shape, dtype or device; and unless the operators are `traced`, so that no numbers are
    there, for whole numbers that would be added.
    """
    check_tensor(f"attend: {name}", tensor, "of bool, whole or float numbers")
    if tensor.is_complex():
        raise UsageError(f"attend: {name} is a tensor of bool, whole or float numbers; got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        meaning = "(batches, kv_length)" if name == "key_padding" else "(length, kv_length)"
        raise UsageError(f"attend: {name} is {meaning}, here {shape}; got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise UsageError(f"attend: {name} is on {tensor.device}, query on {device}")
    multiplies = mode == "mul" or tensor.dtype == torch.bool
    if not (traced or multiplies or tensor.is_floating_point()) and tensor.numel() and bool((tensor.float() > 0).any()):
        raise UsageError(f"attend: {name} has whole numbers above 0 ({tensor.dtype}), which mode 'add' would add to scores; "
                         f"where they say what is seen give {name}.bool(), or mode 'mul'")
    if tensor.requires_grad and torch.is_grad_enabled():
        warn_once(f"attend: {name} requires a gradient, and gets none: give what is learned as bias")
    if multiplies and not tensor.is_floating_point():
        tensor = tensor if tensor.dtype == torch.bool else tensor != 0
    elif multiplies and tensor.dtype == torch.float64:  # fp32 may round to 0, which hides, what is none
        tensor = (tensor != 0).float().masked_fill_(tensor.isnan(), torch.nan)
    elif tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        tensor = tensor.float()
    tensor = for_backward(tensor.detach().contiguous().resolve_neg())
    return Term(tensor=tensor[:, None, None] if name == "key_padding" else tensor[None, None], multiplies=multiplies)


def for_backward(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of one that was made in inference mode, where autograd is to save it."""
    if torch.compiler.is_compiling():  # whose graphs save none
        return tensor
    return tensor.clone() if tensor.is_inference() and torch.is_grad_enabled() else tensor


def key_padding_term(padding: Tensor, mode: Mode, blocks: Blocks, batches: int,
                     device: torch.device) -> tuple[Term, Tensor]:
    """Return the mask of keys (batches, kv_length) as a term, and which blocks it hides.

    Raises UsageError for another shape, mode or device, and for NaN.
    """
    term = mask_term("key_padding", padding, mode, (batches, blocks.kv_length), device)
    return term, hidden_blocks("key_padding", term, blocks).contiguous()


def hidden_blocks(name: str, term: Term, blocks: Blocks) -> Tensor:
    """Return which blocks the mask hides wholly: (batches or 1, query blocks or 1, key blocks).

    Raises UsageError for NaN, and for +inf in a mask that is added, where it is on the host: elsewhere to look would wait.
    """
    tensor = term.tensor[:, 0].unflatten(-1, (blocks.column_blocks, blocks.block))
    if tensor.shape[1] > 1:
        tensor = tensor.unflatten(1, (blocks.row_blocks, blocks.block)).transpose(2, 3).flatten(3)
    else:
        tensor = tensor[:, :1]
    tensor = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    top = tensor.amax(-1)
    if top.device == HOST and top.is_floating_point() and bool(
            (top.isnan() if term.multiplies else ~(top < torch.inf)).any()):
        raise UsageError(f"attend: {name} has {'NaN' if bool(top.isnan().any()) else '+inf'}; where nothing is to be masked "
                         f"give 0 in mode 'add', 1 in mode 'mul'")
    hides = (top == 0) & (tensor.amin(-1) == 0) if term.multiplies else top <= HIDES
    return hides if hides.dim() == 3 else hides.squeeze(-1)


def any_hidden(hidden: list[Tensor]) -> Tensor | None:
    """Return which blocks any of several masks hides wholly, as `hidden_blocks` does; None where that is none."""
    if not hidden or (hidden[0].device == HOST and not any(bool(each.any()) for each in hidden)):  # elsewhere it would wait
        return None
    result = hidden[0]
    for each in hidden[1:]:
        result = result | each
    return result.contiguous()
