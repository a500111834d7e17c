"""The published form of a sparse gradient: rows of a matrix, and which rows they are."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SparseTensor"]


class SparseTensor:
    """The rows of a gradient that torch made sparse, as `nn.Embedding(sparse=True)` does.

    Raises `AssertionError` for a dense tensor.
    """

    def __init__(self, dense_tensor: Tensor | None = None):
        self.orig_dense_tensor = dense_tensor
        self.indices: Tensor | None = None
        self.values: Tensor | None = None
        self.dense_size: list[int] | None = None
        if dense_tensor is not None:
            assert dense_tensor.is_sparse, "SparseTensor: got a dense tensor; give the gradient of a sparse embedding"
            rows = dense_tensor.coalesce()
            self.indices, self.values = rows.indices().flatten(), rows.values()
            self.dense_size = list(dense_tensor.size())

    @property
    def is_sparse(self) -> bool:
        """Whether the original is sparse; it always is."""
        return True

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the original."""
        return self._rows()[1].dtype

    @staticmethod
    def type() -> str:
        """Return the published name of the class."""
        return "deepspeed.SparseTensor"

    def _rows(self) -> tuple[Tensor, Tensor, list[int]]:
        assert self.indices is not None and self.values is not None and self.dense_size is not None, (
            "SparseTensor: is empty; construct it of a sparse gradient")
        return self.indices, self.values, self.dense_size

    def to_coo_tensor(self) -> Tensor:
        """Return torch's sparse tensor of the rows."""
        indices, values, size = self._rows()
        return torch.sparse_coo_tensor(indices.unsqueeze(0), values, size, check_invariants=True)

    def sparse_size(self) -> tuple[int, int]:
        """Return the numbers of elements of the rows with their indices, and of the dense tensor."""
        indices, values, size = self._rows()
        return indices.numel() + values.numel(), torch.Size(size).numel()

    def add(self, b: SparseTensor) -> None:
        """Add the rows of another one of the same size, which come after these."""
        (indices, values, size), (more, others, same) = self._rows(), b._rows()
        assert size == same, f"SparseTensor.add: got the size {same}; give one of {size}"
        self.indices, self.values = torch.cat([indices, more]), torch.cat([values, others])

    def __repr__(self) -> str:
        indices, values, size = self._rows()
        kept, dense = self.sparse_size()
        return (f"DeepSpeed.SparseTensor(indices_size={indices.size()}, values_size={values.size()}, dense_size={size}, "
                f"device={indices.get_device()}, reduction_factor={dense / kept})")
