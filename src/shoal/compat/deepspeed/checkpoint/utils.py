"""Helpers of the published checkpoints."""

from __future__ import annotations

from typing import Any

import torch

from shoal.tree import tree_map

__all__ = ["clone_tensors_for_torch_save"]


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy the tensors of a nest to `device`, so that `torch.save` writes no more than each of them."""
    return tree_map(lambda tensor: tensor.detach().to(device, copy=True), item)
