"""`deepspeed.env_report`: the command `ds_report`, which says what this environment has."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import shoal
from shoal.compat.deepspeed import __version__
from shoal.config.sizes import format_bytes
from shoal.device import device_names

__all__ = ["cli_main", "debug_report", "main", "op_report", "parse_arguments"]


NATIVE = {"optimizer steps": "step", "1-bit packing": "onebit", "checksums": "checksum"}
"""The native libraries by what they do."""


def parse_arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="ds_report", description="Report what this environment has.")
    parser.add_argument("--hide_operator_status", action="store_true", help="leave native code out")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="leave out why native code is missing")
    return parser.parse_args(args)


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the report."""
    if not hide_operator_status:
        op_report(verbose=not hide_errors_and_warnings)
    debug_report()


def cli_main() -> int:
    """Run the command `ds_report`."""
    options = parse_arguments()
    main(options.hide_operator_status, options.hide_errors_and_warnings)
    return 0


def op_report(verbose: bool = True) -> None:
    """Print which native code works here; each library is built at its first use, and torch takes the place of another."""
    from shoal.native.build import load

    missing = "torch: it could not be built, the log says why" if verbose else "torch"
    _table("native code", [(name, missing if load(source) is None else "native") for name, source in NATIVE.items()])


def debug_report() -> None:
    """Print versions, devices and memory."""
    import torch

    devices = device_names() or ["CPU"]
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    _table("general", [
        ("torch", f"{torch.__version__}, {Path(torch.__file__).parent}"),
        ("shoal", f"{shoal.__version__}, {Path(shoal.__file__).parent}"),
        ("as deepspeed", __version__),
        ("python", f"{platform.python_version()}, {sys.executable}"),
        ("CUDA of torch", torch.version.cuda or "none"),
        ("devices", ", ".join(devices)),
        ("cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"),
        ("memory", format_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))),
        ("/dev/shm", "none" if shared is None else f"{format_bytes(shared.total)}, {format_bytes(shared.free)} free"),
    ])


def _table(title: str, rows: list[tuple[str, str]]) -> None:
    print("-" * 50, title, "-" * 50, *(f"{name:.<24} {value}" for name, value in rows), sep="\n")


if __name__ == "__main__":
    sys.exit(cli_main())
