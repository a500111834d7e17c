"""`deepspeed.utils.zero_to_fp32`: the fp32 weights of a checkpoint, of DeepSpeed or of Shoal, as one state dict.

    python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR [--max_shard_size 5GB] [--safe_serialization] [-t TAG]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint import Snapshot
from shoal.compat.deepspeed.checkpoint import constants
from shoal.errors import ShoalError, UsageError
from shoal.interchange import latest, open_checkpoint
from shoal.interchange.layout import model_file
from shoal.log import logger

__all__ = ["GatheredTensor", "atoi", "command", "convert_zero_checkpoint_to_fp32_state_dict",
           "convert_zero_checkpoint_to_state_dict", "get_checkpoint_files", "get_fp32_state_dict_from_zero_checkpoint",
           "get_model_state_file", "get_model_state_files", "get_optim_files", "load_state_dict_from_zero_checkpoint",
           "main", "natural_keys", "to_torch_tensor", "write_script", "zero3_partitioned_param_info"]

SCRIPT = '''#!/usr/bin/env python
"""Write the fp32 weights of this checkpoint as one state dict: python zero_to_fp32.py . OUTPUT_DIR"""

import sys

from shoal.compat.deepspeed.utils.zero_to_fp32 import command

sys.exit(command())
'''
"""The script that lies beside the checkpoints of a run."""
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class GatheredTensor:
    """A tensor of a checkpoint whose elements are read by `contiguous()`."""

    def __init__(self, snapshot: Snapshot, name: str, dtype: torch.dtype | None) -> None:
        self._snapshot = snapshot
        self._name = name
        self.shape = torch.Size(snapshot.shape(name))
        self.dtype = dtype or snapshot.dtype(name)

    def contiguous(self) -> Tensor:
        """Return the whole tensor, on the CPU."""
        return self._snapshot.tensor(self._name, self.dtype)


def get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir: str | Path, tag: str | None = None,
                                             exclude_frozen_parameters: bool = False,
                                             lazy_mode: bool = False) -> OrderedDict[str, Any]:
    """Return the whole state dict of a checkpoint: masters in fp32, and buffers.

    With `lazy_mode` the values are `GatheredTensor`s. Raises ValueError without a file `latest`, FileNotFoundError without
    the folder of the tag, `CheckpointError` for missing or damaged files.
    """
    return _state_dict(checkpoint_dir, tag, torch.float32, exclude_frozen_parameters, lazy_mode)


def _state_dict(checkpoint_dir: str | Path, tag: str | None, dtype: torch.dtype, exclude_frozen: bool,
                lazy: bool) -> OrderedDict[str, Any]:
    folder = Path(checkpoint_dir)
    if tag is None and (tag := latest(folder)) is None:
        raise ValueError(f"Unable to find 'latest' file at {folder}; give the folder that save_checkpoint was given, or a "
                         "tag")
    if not (folder / tag).is_dir():
        raise FileNotFoundError(f"Directory '{folder / tag}' doesn't exist")
    snapshot = open_checkpoint(folder, tag)
    tied: Any = snapshot.shared.get("tied") or {}
    trained: Any = snapshot.shared.get("group_names")
    kept = None if not exclude_frozen or trained is None else {name for group in trained for name in group}
    state: OrderedDict[str, Any] = OrderedDict()
    for stored in sorted(snapshot.names(), key=lambda name: name.startswith("buffer/")):
        kind, _, name = stored.partition("/")
        if kind == "buffer" or (kind == "weight" and (kept is None or name in kept)):
            wanted = dtype if snapshot.dtype(stored).is_floating_point else None
            lazily = GatheredTensor(snapshot, stored, wanted)
            state[name] = lazily if lazy else lazily.contiguous()
    for alias, name in tied.items():
        if name in state:
            state[alias] = state[name]
    return state


def convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir: str | Path, output_dir: str | Path,
                                               max_shard_size: str | int | None = "5GB", safe_serialization: bool = False,
                                               tag: str | None = None, exclude_frozen_parameters: bool = False) -> None:
    """Write that state dict into a folder: `pytorch_model.bin` or `model.safetensors`, or shards with an index."""
    convert_zero_checkpoint_to_state_dict(checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag,
                                          exclude_frozen_parameters)


def convert_zero_checkpoint_to_state_dict(checkpoint_dir: str | Path, output_dir: str | Path,
                                          dtype: torch.dtype = torch.float32, max_shard_size: str | int | None = "5GB",
                                          safe_serialization: bool = False, tag: str | None = None,
                                          exclude_frozen_parameters: bool = False) -> None:
    """Write the state dict in any floating dtype; one shard is in memory at a time."""
    limit = _bytes(max_shard_size)
    state = _state_dict(checkpoint_dir, tag, dtype, exclude_frozen_parameters, True)
    shards: list[list[str]] = [[]]
    filled = 0
    for name, value in state.items():
        size = value.shape.numel() * value.dtype.itemsize
        if shards[-1] and limit is not None and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    stem, end = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    names = [f"{stem}.{end}"] if len(shards) == 1 else [
        f"{stem}-{number:05d}-of-{len(shards):05d}.{end}" for number in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        _write(folder / file, OrderedDict((name, state[name].contiguous()) for name in shard), safe=safe_serialization)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(each.shape.numel() * each.dtype.itemsize for each in state.values())},
                 "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard}}
        (folder / f"{stem}.{end}.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write(path: Path, state: OrderedDict[str, Tensor], *, safe: bool) -> None:
    if safe:
        from safetensors.torch import save_file

        save_file(dict(state), path, metadata={"format": "pt"})
    else:
        torch.save(state, path)


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None) -> nn.Module:
    """Load the fp32 weights of a checkpoint into `model` on the CPU, and return it."""
    model = model.cpu()
    found = model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    if found.missing_keys or found.unexpected_keys:
        logger.warning("load_state_dict_from_zero_checkpoint: the checkpoint lacks %s, and the model lacks %s",
                       found.missing_keys or "nothing", found.unexpected_keys or "nothing")
    return model


def write_script(folder: str | Path) -> Path:
    """Write the script `zero_to_fp32.py` into a folder of checkpoints, and return its path."""
    path = Path(folder) / "zero_to_fp32.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SCRIPT)
    path.chmod(0o755)
    return path


def __getattr__(name: str) -> object:
    """Return a key of the files: scripts import these from here too."""
    if name.isupper() and name in vars(constants):
        return vars(constants)[name]
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """Return the path of the model file of rank 0. Raises FileNotFoundError without the folder or the file."""
    if not Path(checkpoint_dir).is_dir():
        raise FileNotFoundError(f"Directory '{checkpoint_dir}' doesn't exist")
    file = Path(checkpoint_dir) / model_file(zero_stage, 0)
    if not file.exists():
        raise FileNotFoundError(f"can't find model states file at '{file}'")
    return str(file)


def get_checkpoint_files(checkpoint_dir: str, glob_pattern: str) -> list[str]:
    """Return the paths that match, in the order of their numbers. Raises FileNotFoundError if there are none."""
    found = sorted(map(str, Path(checkpoint_dir).glob(glob_pattern)), key=natural_keys)
    if not found:
        raise FileNotFoundError(f"can't find {glob_pattern} files in directory '{checkpoint_dir}'")
    return found


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """Return the paths of the optimizer files, by rank."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str) -> list[str]:
    """Return the paths of the model files, by rank."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def atoi(text: str) -> int | str:
    """Return a number where `text` is one, else `text`."""
    return int(text) if text.isdigit() else text


def natural_keys(text: str) -> list[int | str]:
    """Return a key that sorts numbers within text by their size."""
    return [atoi(part) for part in re.split(r"(\d+)", text)]


def zero3_partitioned_param_info(unpartitioned_numel: int, world_size: int) -> tuple[int, int]:
    """Return the elements of each rank's part at stage 3, and those of the padding of the last one."""
    return -(-unpartitioned_numel // world_size), -unpartitioned_numel % world_size


def to_torch_tensor(state_dict: dict[str, Any], return_empty_tensor: bool = False,
                    dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the tensors of a lazy state dict; with `return_empty_tensor` ones of their shapes whose values are not read.

    Names that share a tensor share it in the result.
    """
    made: dict[int, Tensor] = {}
    for value in state_dict.values():
        if id(value) not in made:
            wanted = dtype if dtype is not None and value.dtype.is_floating_point else value.dtype
            made[id(value)] = (torch.empty(value.shape, dtype=wanted) if return_empty_tensor
                               else value.contiguous().to(wanted))
    return {name: made[id(value)] for name, value in state_dict.items()}


def main(args: Sequence[str] | None = None) -> None:
    """Run the command `zero_to_fp32.py`."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32.py", description="Write the fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="the folder that save_checkpoint was given")
    parser.add_argument("output_dir", help="the folder to write")
    parser.add_argument("--max_shard_size", default="5GB", help="largest file, such as 500MB (default 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="the checkpoint (default: the latest)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted; errors name what is wrong without it")
    options = parser.parse_args(args)
    convert_zero_checkpoint_to_fp32_state_dict(
        options.checkpoint_dir, options.output_dir, max_shard_size=options.max_shard_size, tag=options.tag,
        safe_serialization=options.safe_serialization, exclude_frozen_parameters=options.exclude_frozen_parameters)


def command() -> int:
    """Run `main`, and print an error of the user in one line."""
    try:
        main()
    except (ShoalError, ValueError, OSError) as error:
        print(f"zero_to_fp32.py: {error}", file=sys.stderr)
        return 2
    return 0


def _bytes(size: str | int | None) -> int | None:
    """Return the bytes of a size such as 5GB; None is no limit."""
    if size is None or isinstance(size, int):
        return size
    found = re.fullmatch(r"(\d+)\s*([KMGT]?B)?", size.strip().upper())
    if found is None:
        raise UsageError(f"max_shard_size: got {size!r}; give a size such as 500MB or 5GB, or None")
    return int(found[1]) * UNITS[found[2] if found[2] not in (None, "B") else ""]


if __name__ == "__main__":
    sys.exit(command())
