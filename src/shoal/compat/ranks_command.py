"""The ranks of the command `deepspeed` on one machine: a command line of `shoal run`, and the environment of the job.

The command runs in a process and a session of its own, so that a Ctrl-C at the terminal comes to it once, through this one.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from shoal.cluster.launchers import SSH_OPTIONS

__all__ = ["VISIBLE", "address_of", "command", "device_count", "exports", "exports_file", "is_elsewhere", "run",
           "variables", "visible_devices"]

PR_SET_PDEATHSIG = 1
LOOK_UP = 60
"""Seconds that a host has to tell its address."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that the command gets from this process; those that are ignored here, as nohup has it, are ignored there too."""


def exports_file() -> str:
    """Return the name of the file with variables for other nodes."""
    return os.environ.get("DS_ENV_FILE", ".deepspeed_env")


def visible_devices() -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES, each a device: a number, or a name such as GPU-UUID or MIG-UUID."""
    return [entry.strip() for entry in os.environ.get(VISIBLE, "").split(",") if entry.strip()]


def variables() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def exports(prefixes: Sequence[str], folders: Sequence[str], file_name: str,
            excluded: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the variables that other nodes get: those whose names begin so, and those of the first file there is.

    `excluded` has the variables that stay here, by the variable that must be set for that. Raises ValueError for a line of a
    file without `=`.
    """
    kept = {name for mark, names in excluded.items() if mark in os.environ for name in names}
    found = {name: value for name, value in os.environ.items() if name.startswith(tuple(prefixes)) and name not in kept}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), found.get("PYTHONPATH")]))
    for file in (Path(folder) / file_name for folder in folders):
        if file.is_file():
            # as variables are in `os.environ`
            with file.open(encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
                for line in lines:
                    name, equals, value = line.removesuffix("\n").partition("=")
                    if not equals:
                        raise ValueError(f"{file}: got the line {name!r}; write NAME=VALUE")
                    found[name] = value
    return found


def address_of(host: str, ssh_port: int | None, *, here: bool) -> str:
    """Return the first IPv4 address that `hostname -I` tells on a host: `here`, or over ssh.

    Raises RuntimeError where it tells none.
    """
    port = [] if ssh_port is None else ["-p", str(ssh_port)]
    ask = ["hostname", "-I"] if here else ["ssh", *SSH_OPTIONS, *port, host, "hostname -I"]
    try:
        done = subprocess.run(ask, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=LOOK_UP)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"no answer within {LOOK_UP} s" if isinstance(error, subprocess.TimeoutExpired) else error.strerror
        raise RuntimeError(f"--no_ssh: the address of {host}, the first host, cannot be looked up: {ask[0]}: {why}; give "
                           f"--master_addr") from None
    found = [word for word in done.stdout.split() if re.fullmatch(r"\d+(\.\d+){3}", word)]
    if done.returncode or not found:
        said = done.stderr.strip().splitlines()[-1:] or ["it has no IPv4 address"]
        raise RuntimeError(f"--no_ssh: the address of {host}, the first host, cannot be looked up by `hostname -I` there: "
                           f"{said[0]}; give --master_addr")
    return found[0]


def is_elsewhere(host: str) -> bool:
    """Whether a host is another machine: its name has addresses, and none of them is one of this machine's."""
    if host.partition(".")[0].lower() == socket.gethostname().partition(".")[0].lower():
        return False
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return not any(_is_own(family, where) for family, _, _, _, where in found)


def _is_own(family: int, where: tuple[object, ...]) -> bool:
    """Whether an address is one of this machine's: only these can be bound."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(where)
            return True
    except OSError:
        return False


def device_count() -> int:
    """Return the number of accelerators of this machine, visible or not, else of ranks that LOCAL_SIZE asks for (1)."""
    masked = os.environ.pop(VISIBLE, None)
    try:
        from shoal import device
        from shoal.compat.environment import local_size

        return device.device_count() or local_size()
    finally:
        if masked is not None:
            os.environ[VISIBLE] = masked


def command(script: str, args: Sequence[str], *, ranks: int | None, module: bool, program: bool, local_rank: bool,
            bind: bool, core_list: str | None, log_dir: str | None, more: Sequence[str] = ()) -> list[str]:
    """Return the command that starts `ranks` ranks of a script, a module or a program on this node, or those of `more`.

    Raises ValueError for a `core_list` that is none.
    """
    if bind and core_list is not None and re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", core_list) is None:
        raise ValueError(f"--bind_core_list: got {core_list!r}; write numbers and ranges, such as 0-7,16")
    words = [sys.executable, "-m", "shoal", "run", *([] if ranks is None else ["--ranks", str(ranks)]), *more]
    if module:
        words.append("--module")
    words.append("--no-python" if program else "--as-deepspeed")
    if local_rank:
        words.append("--local-rank-argument")
    if not bind:
        words.append("--no-bind-cores")
    elif core_list is not None:
        words += ["--core-list", core_list]
    if log_dir is not None:
        words += ["--log-dir", log_dir]
    return [*words, script, *args]


def run(words: Sequence[str], *, devices: Sequence[int] | None, node: int = 0, nodes: int = 1,
        ranks: int, variables: Mapping[str, str] | None = None) -> int:
    """Run the command to its end and return its exit code, 128 + N where signal N ended it.

    `devices` are those that the ranks may see (None: those that this process sees), and `variables` are set beside this
    process's.
    """
    shown = {} if devices is None else {VISIBLE: ",".join(map(str, devices))}
    job = {"LOCAL_SIZE": str(ranks), "CROSS_RANK": str(node), "CROSS_SIZE": str(nodes)}

    def begin() -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)

    job_process = subprocess.Popen(words, env={**os.environ, **shown, **job, **(variables or {})}, preexec_fn=begin,
                                   start_new_session=True)

    def forward(number: int, frame: FrameType | None) -> None:
        job_process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in FORWARDED
                if signal.getsignal(number) not in (None, signal.SIG_IGN)}
    try:
        code = job_process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
