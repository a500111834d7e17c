"""`shoal checkpoint inspect|verify|export|convert DIR` lists a checkpoint's tensors, verifies every byte, or writes it anew.

`export` and `convert` read DeepSpeed's checkpoints as well as Shoal's.
"""

from __future__ import annotations

import argparse
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.errors import UsageError
from shoal.launch.console import counted, size_argument

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions with their arguments to `parser`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    inspect = actions.add_parser("inspect", help="list the tensors with shape, dtype, bytes and ranks")
    verify = actions.add_parser("verify", help="check every checksum, and that no element is missing")
    export = actions.add_parser("export", help="write one Hugging Face style safetensors folder")
    convert = actions.add_parser("convert", help="write a folder that DeepSpeed loads")
    for action in (inspect, verify, export, convert):
        action.add_argument("folder", help="the folder given to save_checkpoint", metavar="DIR")
        action.add_argument("--tag", help="which checkpoint of the folder (default: the latest)")
    export.add_argument("out", help="a new folder", metavar="OUT")
    convert.add_argument("out", help="the folder to write the checkpoint to, under its tag", metavar="OUT")
    convert.add_argument("--to", choices=("deepspeed", "universal"), default="deepspeed",
                         help="DeepSpeed's layout of a ZeRO stage (default), or its universal form")
    convert.add_argument("--stage", type=int, default=2, help="the ZeRO stage of the run that is to load it (default 2)")
    convert.add_argument("--ranks", type=int, default=1, help="its data-parallel ranks (default 1)")
    convert.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
                         help="its dtype of compute (default float32)")
    export.add_argument("--dtype", choices=("float32", "bfloat16", "float16"),
                        help="cast parameters (default: as saved, in the precision of their masters)")
    export.add_argument("--model", metavar="MODEL", help="a folder or a name of a Hugging Face model, whose configuration "
                        "and tokenizer are exported too, so that from_pretrained(OUT) works")
    export.add_argument("--max-shard-size", type=size_argument, default="5GB", metavar="SIZE",
                        help="largest file, for example 500MB or 2GiB (default 5GB)")


def main(args: argparse.Namespace) -> int:
    """Run the action; return 1 if `verify` found damage, else 0. Raises CheckpointError without a readable one."""
    match args.action:
        case "inspect":
            return _inspect(args)
        case "verify":
            return _verify(args)
        case "export":
            return _export(args)
        case "convert":
            return _convert(args)
        case _:
            raise AssertionError(args.action)


def _inspect(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from shoal.checkpoint.inspection import inspect

    summary = inspect(args.folder, args.tag)
    table = Table(title=f"{summary.path}", title_justify="left")
    for column in ("tensor", "shape", "dtype", "bytes", "ranges", "ranks"):
        table.add_column(column, justify="right" if column in ("bytes", "ranges") else "left", overflow="fold")
    for line in summary.tensors:
        table.add_row(line.name, " x ".join(map(str, line.shape)) or "scalar", str(line.dtype).removeprefix("torch."),
                      f"{line.bytes:,}", str(line.ranges), _rank_ranges(line.ranks))
    console = Console()
    console.print(table)
    console.print(f"step {summary.step}, saved by {counted(summary.ranks, 'rank')}: "
                  f"{counted(len(summary.tensors), 'tensor')}, "
                  f"{summary.bytes:,} bytes in {counted(summary.files, 'file')}", highlight=False)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from shoal.checkpoint.inspection import verify

    report = verify(args.folder, args.tag)
    contents = f"{report.tensors} tensors, {report.bytes:,} bytes in {report.files} files"
    if not report.faults:
        print(f"{report.path}: intact ({contents})")
        return 0
    print("\n  ".join([f"{report.path}: damaged ({contents})", *report.faults]))
    return 1


def _export(args: argparse.Namespace) -> int:
    import torch

    from shoal.checkpoint.state_dict_export import export, set_dtype_of_config
    from shoal.interchange import open_checkpoint

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, None: None}
    model = None if args.model is None else _ModelFiles(args.model)
    with open_checkpoint(args.folder, args.tag) as snapshot:
        files = export(snapshot, args.out, dtype=dtypes[args.dtype], shard_bytes=args.max_shard_size)
    if model is not None:
        files += model.write(Path(args.out))
        if (dtype := dtypes[args.dtype]) is not None:
            set_dtype_of_config(Path(args.out), dtype)
    for file in files:
        print(file)
    return 0


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
"""Ends of the names of files that hold or list weights."""


class _ModelFiles:
    """The files of a Hugging Face model beside its weights: configuration, tokenizer, generation, code of its own."""

    def __init__(self, model: str):
        """Find the files of `model`, a folder or a name. Raises `UsageError` where it has no configuration."""
        self._model = model
        self._is_folder = Path(model).is_dir()
        if self._is_folder and not (Path(model) / "config.json").is_file():
            raise UsageError(f"--model {model}: the folder has no config.json; give the folder of a Hugging Face model, or "
                             f"its name")
        self._loaded = [] if self._is_folder else self._load()

    def _load(self) -> list[Any]:
        """Load what the name stands for, by transformers."""
        try:
            from transformers import AutoConfig, AutoTokenizer
        except ImportError:
            raise UsageError(f"--model {self._model}: is no folder, and a name needs the package transformers; install it, "
                             f"or give a folder") from None
        try:
            loaded: list[Any] = [AutoConfig.from_pretrained(self._model)]
        except (OSError, ValueError) as error:
            raise UsageError(f"--model {self._model}: is neither a folder nor a known model: {error}") from error
        with suppress(OSError, ValueError):  # a model without text
            loaded.append(AutoTokenizer.from_pretrained(self._model))
        return loaded

    def write(self, out: Path) -> list[Path]:
        """Write the files into `out`; return them."""
        before = set(out.iterdir())
        for part in self._loaded:
            part.save_pretrained(out)
        for file in sorted(Path(self._model).iterdir()) if self._is_folder else ():
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copyfile(file, out / file.name)
        return sorted(set(out.iterdir()) - before)


def _convert(args: argparse.Namespace) -> int:
    from pathlib import Path

    import torch

    from shoal.interchange import open_checkpoint
    from shoal.interchange.universal import write_universal
    from shoal.interchange.writer import Target, write_folder

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    with open_checkpoint(args.folder, args.tag) as snapshot:
        if args.to == "universal":
            print(write_universal(snapshot, Path(args.out) / snapshot.tag))
        else:
            target = Target(stage=args.stage, ranks=args.ranks, dtype=dtypes[args.dtype])
            print(write_folder(snapshot, args.out, snapshot.tag, target))
    return 0


def _rank_ranges(ranks: list[int]) -> str:
    """Format sorted ranks such as `0-3, 5`."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], rank]
        else:
            ranges.append([rank])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)
