"""Products and the softmax of block-sparse matrices, under the published names, as plain torch operations.

A block-sparse matrix of a layout (heads, row blocks, column blocks) is a tensor (batch, visited blocks, block, block): the
visited blocks of all heads in the order of `layout.nonzero()`. Dense operands are (batch, heads, rows, columns). `attend`
fuses the three steps and is faster; these are for attention of one's own between them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from shoal.attention.arguments import check_tensor
from shoal.attention.blocks import Blocks
from shoal.attention.call import addend
from shoal.attention.masks import Mode
from shoal.device import HOST
from shoal.errors import NotServed, UsageError

__all__ = ["MatMul", "Softmax"]


class _OfLayout:
    """The visited blocks of a layout (heads, row blocks, column blocks) of 0 and 1."""

    def __init__(self, layout: Tensor, block: int):
        Blocks.of(layout, block)  # raises for what is no layout
        self.layout, self.block = layout, block
        self.heads, self.rows, self.columns = layout.cpu().nonzero().unbind(1)

    def _check_sparse(self, matrix: Tensor) -> None:
        expected = (len(self.heads), self.block, self.block)
        check_tensor(f"{type(self).__name__}: a block-sparse matrix", matrix, "(batch, visited blocks, block, block)")
        if matrix.dim() != 4 or tuple(matrix.shape[1:]) != expected:
            raise UsageError(f"{type(self).__name__}: a block-sparse matrix of this layout is (batch, visited blocks, "
                             f"block, block), here (batch, {', '.join(map(str, expected))}); got {tuple(matrix.shape)}")

    def _cut(self, matrix: Tensor, dim: int, blocks: int) -> Tensor:
        """Return a dense matrix with `dim` cut into blocks, put second to last before the block."""
        check_tensor(f"{type(self).__name__}: a dense operand", matrix, "(batch, heads, rows, columns)")
        if matrix.dim() != 4 or matrix.shape[1] != self.layout.shape[0] or matrix.shape[dim] != blocks * self.block:
            raise UsageError(f"{type(self).__name__}: a dense operand is (batch, {self.layout.shape[0]} heads, rows, "
                             f"columns) with {blocks * self.block} along the sparse side; got {tuple(matrix.shape)}")
        return matrix.unflatten(dim, (blocks, self.block))


class MatMul(_OfLayout):
    """A product in which the result ("sdd"), the first ("dsd") or the second operand ("dds") is block-sparse.

    `trans_a` and `trans_b` transpose an operand before the product; a sparse one with its layout. Raises NotServed for
    another mode, UsageError for operands that do not fit the layout.
    """

    def __init__(self, layout: Tensor, block: int, mode: Literal["sdd", "dsd", "dds"], trans_a: bool = False,
                 trans_b: bool = False):
        super().__init__(layout, block)
        if mode not in ("sdd", "dsd", "dds"):
            raise NotServed(f"MatMul: mode: got {mode!r}; choose 'sdd', 'dsd' or 'dds': s is sparse, d dense, the "
                            f"result first")
        self.mode, self.trans_a, self.trans_b = mode, trans_a, trans_b

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product of `a` and `b`; it has a gradient for both."""
        a = a.transpose(-1, -2) if self.trans_a else a
        b = b.transpose(-1, -2) if self.trans_b else b
        match self.mode:
            case "sdd":
                rows, columns = self.layout.shape[1:]
                left = self._cut(a, 2, rows)[:, self.heads, self.rows]
                right = self._cut(b, 3, columns).transpose(2, 3)[:, self.heads, self.columns]
                return left @ right
            case "dsd":
                return self._with_sparse(a, b, transposed=self.trans_a)
            case _:
                return self._with_sparse(b.transpose(-1, -2), a.transpose(-1, -2), transposed=not self.trans_b
                                         ).transpose(-1, -2)

    def _with_sparse(self, sparse: Tensor, dense: Tensor, *, transposed: bool) -> Tensor:
        """Return sparse @ dense, where the blocks of `sparse` are in order, but its layout may be `transposed`."""
        self._check_sparse(sparse)
        rows, columns = (self.columns, self.rows) if transposed else (self.rows, self.columns)
        row_blocks, column_blocks = self.layout.shape[1:] if not transposed else self.layout.shape[:0:-1]
        products = sparse @ self._cut(dense, 2, column_blocks)[:, self.heads, columns]
        heads = self.layout.shape[0]
        result = products.new_zeros(len(products), heads * row_blocks, self.block, dense.shape[-1])
        result = result.index_add(1, (self.heads * row_blocks + rows).to(result.device), products)
        return result.unflatten(1, (heads, row_blocks)).flatten(2, 3)


class Softmax(_OfLayout):
    """The softmax of each row of a block-sparse matrix, of what its layout visits. A row that sees nothing gives zeros."""

    def __call__(self, x: Tensor, scale: float = 1.0, rpe: Tensor | None = None, key_padding_mask: Tensor | None = None,
                 attn_mask: Tensor | None = None, key_padding_mask_mode: Mode = "add",
                 attn_mask_mode: Mode = "add") -> Tensor:
        """Return the softmax of `scale` x + masks: (batch, visited blocks, block, block).

        `rpe` (batch or 1, heads or 1, length, length) is added, `key_padding_mask` is (batch or 1, length), `attn_mask`
        (length, length), with any dims of `rpe` before; in mode "mul", or of dtype bool, a mask hides where it is 0. Raises
        UsageError for other shapes and modes.
        """
        self._check_sparse(x)
        heads, row_blocks, column_blocks = self.layout.shape
        keys = column_blocks * self.block
        _check_mask("key_padding_mask", key_padding_mask, key_padding_mask_mode, (len(x), keys))
        _check_mask("attn_mask", attn_mask, attn_mask_mode, (len(x), heads, row_blocks * self.block, keys))
        scores = x.float() * scale
        if rpe is not None:
            check_tensor("Softmax: rpe", rpe, "(length, length), with any of heads and batch before")
            scores = scores + addend(self._tiles(rpe))
        if key_padding_mask is not None:
            columns = key_padding_mask.unflatten(-1, (self.layout.shape[2], self.block))[:, self.columns, None]
            scores = scores + _added(columns, key_padding_mask_mode)
        if attn_mask is not None:
            scores = scores + _added(self._tiles(attn_mask), attn_mask_mode)
        rows = (self.heads * self.layout.shape[1] + self.rows).to(x.device)
        shape = (len(x), self.layout.shape[0] * self.layout.shape[1], self.block)
        index = rows[None, :, None].expand(len(x), -1, self.block)
        top = scores.new_full(shape, -torch.inf).scatter_reduce(1, index, scores.detach().amax(-1), "amax")
        weights = (scores - top.masked_fill(top == -torch.inf, 0.0)[:, rows, :, None]).exp()
        sums = scores.new_zeros(shape).index_add(1, rows, weights.sum(-1))
        return (weights / sums.masked_fill(sums == 0, 1.0)[:, rows, :, None]).to(x.dtype)

    def _tiles(self, matrix: Tensor) -> Tensor:
        """Return the visited blocks (batch or 1, visited, block, block) of a dense matrix."""
        wide = matrix.reshape((1,) * (4 - matrix.dim()) + tuple(matrix.shape))
        wide = wide.expand(-1, self.layout.shape[0], -1, -1)
        cut = self._cut(wide, 2, self.layout.shape[1]).unflatten(4, (self.layout.shape[2], self.block)).transpose(3, 4)
        return cut[:, self.heads, self.rows, self.columns]


def _check_mask(name: str, mask: Tensor | None, mode: str, shape: tuple[int, ...]) -> None:
    """Raise UsageError for a mask that does not expand to `shape`, of which the first dims may be 1 or missing; for NaN; and
    for +inf, or a mask of 0 and 1 in whole numbers, where it is added."""
    if mode not in ("add", "mul"):
        raise UsageError(f"Softmax: {name}_mode is 'add' or 'mul'; got {mode!r}")
    if mask is None:
        return
    check_tensor(f"Softmax: {name}", mask, "of bool, whole or float numbers")
    least = 2 if len(shape) > 2 else 1
    fits = 2 <= mask.dim() <= len(shape) and mask.shape[-least:] == shape[-least:] and all(
        size in (1, whole) for size, whole in zip(mask.shape[::-1], shape[::-1], strict=False))
    if not fits:
        raise UsageError(f"Softmax: {name} is {shape} here, where the first dims may be 1; got {tuple(mask.shape)}")
    if mask.device != HOST:  # it would wait
        return
    added = mode == "add" and mask.dtype != torch.bool
    if added and not mask.is_floating_point() and mask.numel() and int(mask.max()) > 0:
        raise UsageError(f"Softmax: {name} has whole numbers above 0 ({mask.dtype}), which mode 'add' would add to scores; "
                         f"where they say what is seen give {name}.bool(), or mode 'mul'")
    if mask.is_floating_point() and bool((~(mask < torch.inf) if added else mask.isnan()).any()):
        raise UsageError(f"Softmax: {name} has {'NaN' if bool(mask.isnan().any()) else '+inf'}; where nothing is to be "
                         f"masked give 0 in mode 'add', 1 in mode 'mul'")


def _added(mask: Tensor, mode: Mode) -> Tensor:
    if mode == "add" and mask.dtype != torch.bool:
        return addend(mask)
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(mask == 0, -torch.inf)
