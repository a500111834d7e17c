"""The published checkpoint engine that writes and reads files by torch."""

from __future__ import annotations

from typing import Any

import torch

from shoal.compat.deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

__all__ = ["TorchCheckpointEngine"]

ENGINE_NAME = "TorchCheckpointEngine"


class TorchCheckpointEngine(CheckpointEngine):
    """`torch.save` and `torch.load`. Load files of a source you trust: they may hold any object."""

    def __init__(self, config_params: Any = None):
        super().__init__(config_params)
        self.name = ENGINE_NAME

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: a folder is created by `makedirs`."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write a state dict."""
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a state dict."""
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return True: every file is complete once `save` returns."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """Return True: torch writes each storage once."""
        return True
