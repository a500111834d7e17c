"""Checkpoints without a topology: what any ranks saved, any other ranks load.

A checkpoint is a set of pieces of named tensors (`piece`), written by `Writer`, read by `read`, and kept in a folder
under a tag (`folder`).
"""

from shoal.checkpoint.folder import Tag, latest, tags
from shoal.checkpoint.inspection import inspect, verify
from shoal.checkpoint.piece import Piece, boxes
from shoal.checkpoint.ranks import Ranks
from shoal.checkpoint.snapshot import Snapshot, read
from shoal.checkpoint.state_dict import export, export_dcp
from shoal.checkpoint.writer import FILE_BYTES, Pending, Writer, settle, write

__all__ = ["FILE_BYTES", "Pending", "Piece", "Ranks", "Snapshot", "Tag", "Writer", "boxes", "export", "export_dcp",
           "inspect", "latest", "read", "settle", "tags", "verify", "write"]
