"""`open_checkpoint` opens a checkpoint in any known format: Shoal's own, DeepSpeed's, or its universal one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shoal.checkpoint import Ranks, Snapshot, folder, read
from shoal.checkpoint import latest as latest_tag
from shoal.checkpoint.index import INDEX
from shoal.errors import CheckpointError
from shoal.interchange.contents import ForeignCheckpoint, PieceSnapshot
from shoal.interchange.layout import has_deepspeed_files
from shoal.interchange.reader import read_folder
from shoal.interchange.universal import LATEST_UNIVERSAL, is_universal, read_universal

__all__ = ["damage", "latest", "open_checkpoint"]


def latest(where: Path) -> str | None:
    """Return the tag that was saved last, of a universal checkpoint if there is no other; None if there is none."""
    tag = latest_tag(where)
    if tag is None and (where / LATEST_UNIVERSAL).is_file():
        tag = (where / LATEST_UNIVERSAL).read_text().strip() or None
    return tag


def damage(where: Path) -> str | None:
    """Return why the checkpoint that `latest` names cannot be loaded, as its index and the sizes of its files show.

    None where they show no damage, where nothing is named, and for a checkpoint that DeepSpeed wrote.
    """
    name = latest_tag(where)
    if name is None or _foreign(where, name) is not None:
        return None
    path = folder.locate(where, name)
    if path is None:
        return f"{where}: 'latest' names {name!r}, but there is no such checkpoint"
    try:
        faults = folder.faults(path, folder.load_index(path))
    except CheckpointError as error:
        return str(error)
    return "\n  ".join([f"{path}: damaged", *faults]) if faults else None


def open_checkpoint(where: str | os.PathLike[str], tag: str | None = None, *, ranks: Ranks | None = None,
                    groups: Sequence[Sequence[str]] | None = None) -> Snapshot:
    """Open the checkpoint `where/tag`; a tag of None means the latest. A collective call of `ranks`.

    `groups` are the names of the parameters of each optimizer group, which DeepSpeed's stage 0 does not save. Raises
    CheckpointError on every rank if there is no such checkpoint, or it is damaged.
    """
    ranks = ranks or Ranks()
    parent = Path(where)
    with ranks.lock:
        path = ranks.run_collectively("could not load", lambda: _foreign(parent, tag))
        seen = {each.decode() for each in ranks.all_gather(str(path or "").encode())}
        if len(seen) > 1:
            raise CheckpointError(f"{where}: ranks see different checkpoints there ({', '.join(sorted(seen))}); give a "
                                  "folder that all ranks share")
        if path is not None:
            contents = ranks.run_collectively(f"could not load {path}", lambda: _contents(path, groups))
            return PieceSnapshot(path, contents, ranks)
    return read(where, tag, ranks=ranks)


def _foreign(parent: Path, tag: str | None) -> Path | None:
    """Return the folder of a checkpoint that DeepSpeed wrote, or None."""
    name = latest(parent) if tag is None else tag
    path = None if name is None else folder.locate(parent, name)
    return path if path is not None and not (path / INDEX).exists() and has_deepspeed_files(path) else None


def _contents(path: Path, groups: Sequence[Sequence[str]] | None) -> ForeignCheckpoint:
    return read_universal(path) if is_universal(path) else read_folder(path, groups)
