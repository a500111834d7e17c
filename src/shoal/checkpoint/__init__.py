"""Checkpoints without a topology: what any ranks saved, any other ranks load.

A checkpoint is a set of pieces of named tensors (`piece`), written by `Writer`, read by `read`, and kept in a folder
under a tag (`folder`).
"""

from shoal.checkpoint.export import export, export_dcp
from shoal.checkpoint.folder import Tag, latest, tags
from shoal.checkpoint.inspect import inspect, verify
from shoal.checkpoint.piece import Piece, boxes
from shoal.checkpoint.ranks import Ranks
from shoal.checkpoint.snapshot import Snapshot, read
from shoal.checkpoint.writer import FILE_BYTES, PendingSave, Writer, settle, write

__all__ = ["FILE_BYTES", "PendingSave", "Piece", "Ranks", "Snapshot", "Tag", "Writer", "boxes", "export", "export_dcp",
           "inspect", "latest", "read", "settle", "tags", "verify", "write"]
