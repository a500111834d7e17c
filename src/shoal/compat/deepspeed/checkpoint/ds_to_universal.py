"""`deepspeed.checkpoint.ds_to_universal`: a checkpoint, of DeepSpeed or of Shoal, in DeepSpeed's universal form.

    python -m deepspeed.checkpoint.ds_to_universal --input_folder DIR/TAG --output_folder DIR/TAG_universal

Shoal loads every checkpoint at any size without it; the universal form is for DeepSpeed, which then does too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from shoal.interchange import open_checkpoint
from shoal.interchange.universal import write_universal

__all__ = ["main", "parse_arguments"]


def parse_arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Write a checkpoint in the universal form.")
    parser.add_argument("--input_folder", required=True, help="the checkpoint, with its tag")
    parser.add_argument("--output_folder", required=True, help="the folder to write")
    for name in ("--num_extract_workers", "--num_merge_workers"):
        parser.add_argument(name, type=int, default=1, help="accepted; one process streams the tensors")
    for name in ("--keep_temp_folder", "--no_strict", "--inject_missing_state"):
        parser.add_argument(name, action="store_true", help="accepted; there is nothing to keep or to inject")
    return parser.parse_args(args)


def main(args: argparse.Namespace) -> None:
    """Convert the checkpoint that the parsed arguments name. Raises `CheckpointError` for a missing or damaged one."""
    source = Path(args.input_folder)
    with open_checkpoint(source.parent, source.name) as snapshot:
        write_universal(snapshot, Path(args.output_folder))


if __name__ == "__main__":
    main(parse_arguments())
