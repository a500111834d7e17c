"""An export is the model's full state dict under its own names, in a format that other libraries read.

Each parameter keeps the precision in which it was saved: that of its master, or its own for a frozen parameter. At most one
tensor is in memory at a time. An incomplete model is not exported: `shared["parameters"]` (name -> shape) lists the expected
parameters, and `shared["tied"]` (alias -> name) lists the names that share one tensor.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from shoal.checkpoint.folder import sync
from shoal.checkpoint.rank_file import disk_full
from shoal.checkpoint.snapshot import Snapshot
from shoal.checkpoint.tensor_file import Entry, header, memory, widest_first, write_all
from shoal.errors import CheckpointError
from shoal.log import logger

__all__ = ["SHARD_BYTES", "export", "export_dcp", "set_dtype_of_config"]

SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """One tensor of the state dict and the name of its source tensor in the checkpoint."""

    name: str
    stored: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def entry(self) -> Entry:
        return Entry(key=self.name, dtype=self.dtype, shape=self.shape)


def export(snapshot: Snapshot, out: str | os.PathLike[str], *, dtype: torch.dtype | None = None,
           shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write a Hugging Face style safetensors folder `out` and return its files.

    The folder has one `model.safetensors`, or an index and shards of at most `shard_bytes`; a larger tensor has its own
    shard. Floating-point parameters are cast to `dtype` (None: as saved); buffers keep their dtypes. The folder `out`
    appears only when it is complete. Raises CheckpointError if a tensor is missing or empty, `out` is not empty, or the
    disk is full.
    """
    shards = _shards(_items(snapshot, dtype), shard_bytes)
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: exists and is not an empty folder; export to a new one")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    draft.mkdir()
    try:
        names = _write(snapshot, shards, draft)
        sync(draft)
        os.rename(draft, target)
        sync(target.parent)
    except OSError as error:
        needed = sum(item.entry.bytes for shard in shards for item in shard)
        if (full := disk_full(error, target.parent, needed)) is not None:
            raise CheckpointError(f"could not export to {target}: {full}") from error
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return [target / name for name in names]


def export_dcp(snapshot: Snapshot, out: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
    """Write the state dict as a `torch.distributed.checkpoint` folder. The whole state dict is in memory meanwhile."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {item.name: _tensor(snapshot, item) for item in _items(snapshot, dtype)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process is intended
        save(state, storage_writer=FileSystemWriter(out), no_dist=True)


def set_dtype_of_config(folder: Path, dtype: torch.dtype) -> None:
    """Have the `config.json` of a Hugging Face folder, if it has one, say that the weights are of `dtype`."""
    path = folder / "config.json"
    if path.is_file():
        config = cast("dict[str, object]", json.loads(path.read_text()))
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
        path.write_text(json.dumps(config, indent=2) + "\n")


def _items(snapshot: Snapshot, dtype: torch.dtype | None) -> list[_Item]:
    """List the state dict: parameters, tied names, buffers. Raises CheckpointError unless it is complete."""
    stored = set(snapshot.names())
    expected = _expected(snapshot)
    aliases = cast("Mapping[str, str]", snapshot.shared.get("tied", {}))
    items: list[_Item] = []
    faults: list[str] = []
    for name in dict.fromkeys([*expected, *aliases]):
        owner = aliases.get(name, name)
        source = f"weight/{owner}"
        if source not in stored:
            faults.append(f"{name}: missing")
            continue
        shape = snapshot.shape(source)
        wanted = expected.get(name, expected.get(owner))
        if wanted is None and prod(shape) == 0:
            faults.append(f"{name}: empty, saved with shape {shape}")
        elif wanted is not None and shape != wanted:
            faults.append(f"{name}: saved with shape {shape}, the model has {wanted}")
        saved = snapshot.dtype(source)
        items.append(_Item(name=name, stored=source, shape=shape,
                           dtype=dtype if dtype and saved.is_floating_point else saved))
    if extra := sorted(cast("Mapping[str, object]", snapshot.shared.get("extra_states", {}))):
        logger.warning("%s: the extra state of %d modules, such as '%s', is not exported: the file holds tensors alone; "
                       "load the checkpoint itself to have it", snapshot.path, len(extra), extra[0])
    if faults:
        raise CheckpointError("\n  ".join([f"{snapshot.path}: the model is incomplete, so it is not exported:", *faults]))
    return items + [_Item(name=name.removeprefix("buffer/"), stored=name, shape=snapshot.shape(name),
                          dtype=snapshot.dtype(name)) for name in sorted(stored) if name.startswith("buffer/")]


def _expected(snapshot: Snapshot) -> dict[str, tuple[int, ...] | None]:
    """Return the parameters that the model had, with their shapes if they are known."""
    shapes = cast("Mapping[str, Sequence[int]] | None", snapshot.shared.get("parameters"))
    if shapes is not None:
        return {name: tuple(shape) for name, shape in shapes.items()}
    names = [name.partition("/")[2] for name in snapshot.names() if name.startswith("weight/")]
    return dict.fromkeys(names)


def _shards(items: Iterable[_Item], limit: int) -> list[list[_Item]]:
    """Fill shards in the order of the items; sort each shard by dtype width, widest first."""
    shards: list[list[_Item]] = [[]]
    room = limit
    for item in items:
        if shards[-1] and item.entry.bytes > room:
            shards.append([])
            room = limit
        shards[-1].append(item)
        room -= item.entry.bytes
    return [sorted(shard, key=lambda item: widest_first(item.dtype)) for shard in shards]


def _write(snapshot: Snapshot, shards: list[list[_Item]], folder: Path) -> list[str]:
    count = len(shards)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("xb", buffering=0) as file:
            write_all(file.fileno(), header([item.entry for item in shard], {"format": "pt"}))
            for item in shard:
                write_all(file.fileno(), memory(_tensor(snapshot, item).reshape(-1).view(torch.uint8)))
            os.fsync(file.fileno())
    if count == 1:
        return names
    weight_map = {item.name: name for name, shard in zip(names, shards, strict=True) for item in shard}
    size = sum(item.entry.bytes for shard in shards for item in shard)
    with (folder / "model.safetensors.index.json").open("x") as file:
        json.dump({"metadata": {"total_size": size}, "weight_map": weight_map}, file, indent=2, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    return [*names, "model.safetensors.index.json"]


def _tensor(snapshot: Snapshot, item: _Item) -> Tensor:
    return snapshot.tensor(item.stored, item.dtype)
