"""Checkpoints are independent of the topology: any number of ranks can load what any other number of ranks saved.

A checkpoint is a set of pieces of named tensors (`piece.py`). `Writer` writes it and `read` opens it. Each checkpoint is a
subfolder, named by its tag, of the folder given to `save_checkpoint` (`folder.py`).
"""

from shoal.checkpoint.extra_state import SUFFIX as EXTRA_STATE
from shoal.checkpoint.extra_state import extra_states, load_extra_states
from shoal.checkpoint.folder import Tag, latest, tags
from shoal.checkpoint.inspection import inspect, verify
from shoal.checkpoint.nodes import Nodes
from shoal.checkpoint.piece import Piece, boxes
from shoal.checkpoint.rank_file import LinkedStaging
from shoal.checkpoint.ranks import Ranks
from shoal.checkpoint.snapshot import Snapshot, read, read_unpublished
from shoal.checkpoint.spread_snapshot import SpreadSnapshot
from shoal.checkpoint.state_dict_export import export, export_dcp
from shoal.checkpoint.writer import FILE_BYTES, PendingSave, Writer, wait_for_saves, write

__all__ = [
           "EXTRA_STATE",
           "FILE_BYTES",
           "LinkedStaging",
           "Nodes",
           "PendingSave",
           "Piece",
           "Ranks",
           "Snapshot",
           "SpreadSnapshot",
           "Tag",
           "Writer",
           "boxes",
           "export",
           "export_dcp",
           "extra_states",
           "inspect",
           "latest",
           "load_extra_states",
           "read",
           "read_unpublished",
           "tags",
           "verify",
           "wait_for_saves",
           "write",
]
