"""The first word selects a command. Only that command's module is imported, and torch only if the command needs it.

A command is a module of this package with `add_arguments(parser)` and `main(args) -> int`.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, cast

from shoal.errors import ShoalError, UsageError
from shoal.version import __version__

__all__ = ["main"]

COMMANDS = {
    "run": "start a script on several ranks",
    "doctor": "show what a job does, or died of: phases, waits, stacks, memory",
    "check-cluster": "examine the hosts of a job: logins, versions, clocks, links, memory, disks",
    "sbatch": "write a Slurm script whose ranks save before the time limit",
    "config": "show the resolved values of a configuration and the origin of each",
    "checkpoint": "inspect, verify or export a checkpoint",
    "disk": "benchmark a disk for offloaded training state",
    "pipeline": "simulate and draw a pipeline's schedule",
    "attention": "draw a layout of block-sparse attention, with its cost",
}


class _Command(Protocol):
    add_arguments: Callable[[argparse.ArgumentParser], None]
    main: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for a user error, 130 after Ctrl-C, else the command's exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # words and names of files may be no text
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _dispatch(words[0], words[1:]) if words else _show_help(2)
        finally:  # after --help of a command, too, which exits
            if sys.stdout is not None:
                sys.stdout.flush()  # here an error can be told
    except ShoalError as error:
        print(f"shoal {words[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if not _is_of_output(error):
            raise
        if error.errno == errno.EPIPE:  # its reader has what it wants
            return 128 + signal.SIGPIPE
        print(f"shoal {' '.join(words[:1])}: the standard output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _is_of_output(error: OSError) -> bool:
    """Whether a line to standard output fails with `error` too; then it leads nowhere from here on."""
    if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EBADF, errno.EIO):
        return False
    try:
        os.write(1, b"\n")
    except OSError as lost:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)  # what is buffered would fail again at the exit
        os.close(null)
        return lost.errno == error.errno
    return False


def _dispatch(name: str, words: list[str]) -> int:
    if name in ("-h", "--help"):
        return _show_help(0)
    if name in ("-V", "--version"):
        print(f"shoal {__version__}")
        return 0
    if name not in COMMANDS:
        raise UsageError(_unknown(name))
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working folder has been removed; change to one that exists") from None
    command = cast(_Command, importlib.import_module(f"shoal.launch.{name.replace('-', '_')}"))
    parser = _Parser(prog=f"shoal {name}", description=COMMANDS[name], allow_abbrev=False)
    command.add_arguments(parser)
    return command.main(parser.parse_args(words))


class _Parser(argparse.ArgumentParser):
    """A parser whose error about an unknown option names the nearest one that there is."""

    def error(self, message: str) -> NoReturn:
        option = message.removeprefix("unrecognized arguments: ").split()[0]
        near = difflib.get_close_matches(option, self._option_string_actions, n=1, cutoff=0.7)
        super().error(f"{message}; did you mean {near[0]}?" if near and option != message else message)


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    hint = f"did you mean `shoal {near[0]}`?" if near else "start a script with `shoal run SCRIPT`"
    return f"there is no command {name!r}; choose {', '.join(COMMANDS)}; {hint}"


def _show_help(code: int) -> int:
    commands = "\n".join(f"  {name:<16}{summary}" for name, summary in COMMANDS.items())
    print(f"usage: shoal COMMAND ...\n\ncommands:\n{commands}\n\n"
          "`shoal COMMAND --help` describes a command; `shoal --version` prints the version.")
    return code
