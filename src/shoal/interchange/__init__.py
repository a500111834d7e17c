"""Checkpoints in DeepSpeed's formats are read as snapshots and written from snapshots, at any stage and any number of ranks.

    archive.py     what `torch.save` writes, parsed without unpickling
    contents.py    the tensors of a foreign checkpoint as pieces, and a snapshot of them
    layout.py      the facts: file names, the partition of parameters over ranks, the names of keys
    reader.py      a folder of ZeRO stages 0 to 3, of a model or a pipeline
    universal.py   the universal form, one folder for each parameter
    writer.py      a snapshot, written as such a folder

`open_checkpoint` recognises the format of a folder, Shoal's own included, so a loading engine need not know it.
"""

from shoal.interchange.contents import ForeignCheckpoint, PieceSnapshot
from shoal.interchange.opening import damage, latest, open_checkpoint

__all__ = ["ForeignCheckpoint", "PieceSnapshot", "damage", "latest", "open_checkpoint"]
