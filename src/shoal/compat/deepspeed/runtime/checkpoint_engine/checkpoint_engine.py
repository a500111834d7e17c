"""The published interface of what writes and reads the files of a checkpoint."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

__all__ = ["CheckpointCommitInfo", "CheckpointEngine"]


@dataclass
class CheckpointCommitInfo:
    """One checkpoint: its tag, its folder, and whether `latest` is to name it."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """Writes and reads files: `create` begins a checkpoint, `commit` ends it."""

    def __init__(self, config_params: Any = None):
        self.name: str | None = None

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint."""

    @abstractmethod
    def save(self, state_dict: Any, path: str) -> None:
        """Write one file."""

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file."""

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool:
        """End a checkpoint: its files are complete."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder."""
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Whether this data rank writes what all data ranks have."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Whether files are written while training goes on."""
        return False

    def set_commit_info(self, info: CheckpointCommitInfo) -> None:  # noqa: B027  a subclass may leave it
        """Do nothing: `commit` is given the checkpoint."""

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """Return None: no checkpoint waits for its commit."""
        return None

    def preserves_storage_sharing(self) -> bool:
        """Whether tensors that share memory do so in the file as well."""
        return False

    def cleanup(self) -> None:  # noqa: B027  a subclass may leave it
        """Do nothing: no thread or process is left."""
