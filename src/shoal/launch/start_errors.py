"""A table of the errors of ssh, other launchers and Python when a host cannot be started, each with its remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["Banners", "explain", "host_of_step", "means_failure", "names"]

COMPLAINTS: tuple[tuple[str, str], ...] = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key verification failed",
     "its key is not the one that ssh knows; if the host was reinstalled, run ssh-keygen -R HOST and connect once by hand"),
    (r"Permission denied \(", "it refuses the login; put your public key there (ssh-copy-id HOST)"),
    (r"Connection refused", "it refuses the connection; start sshd there, or give the port with --ssh-port"),
    (r"No route to host|Connection timed out|Network is unreachable|connect to host .* timed out",
     "it does not answer; is it up, and is the network?"),
    (r"Could not resolve hostname|Name or service not known|Temporary failure in name resolution",
     "no such host; correct the name, or add it to ~/.ssh/config"),
    (r"(?:sh|bash|exec): .*(?:not found|No such file)|execve\(\)|execvp error|could not find an executable|"
     r"unable to find the specified executable|could not access or execute an executable",
     "it has no such Python; install the same environment at the same path there"),
    (r"Could not establish a configuration source|Unable to contact slurm controller",
     "no Slurm answers; start on a machine of its cluster, or set SLURM_CONF"),
    (r"Check SLURM_JOB_ID environment variable",
     "SLURM_JOB_ID names a job that is over; unset SLURM_JOB_ID, or start within a job that runs"),
    (r"can't open file .*bootstrap\.py", "Shoal is not installed at the same path there; install it as here"),
    (r"No module named '?shoal", "this Python has no Shoal there; install it as here"),
    (r"(?:^|: )shoal: \S+: (?P<said>.*)", ""),
)
"""Patterns of error streams, and what they mean; a group `said` is the meaning itself."""
EXIT_CODE = r"exited with exit code \d+$"
RULE = r"-{20,}"
"""The line before and after each message of Open MPI."""
BANNER_HOST = r"\b(?:Node|Local host): +(\S+)"
"""The host that a message of Open MPI is about."""


class Banners:
    """Joins the lines of each message of Open MPI, which stand between two lines of dashes, to one."""

    def __init__(self) -> None:
        self._lines: list[str] | None = None

    def take(self, line: str) -> str:
        """Return a line that is complete: this one, or, at the end of a message, all of it; empty within a message."""
        if re.fullmatch(RULE, line.strip()):
            said, self._lines = " ".join(self._lines or ()), [] if self._lines is None else None
            return said
        if self._lines is None:
            return line
        self._lines.append(line.strip())
        return ""

    def end(self) -> str:
        """Return what a message has whose end does not come."""
        said, self._lines = " ".join(self._lines or ()), None
        return said


def explain(lines: Iterable[str]) -> str:
    """Return the meaning of an error stream's lines, with the remedy; the last line if none is known; empty for no lines.

    A line that tells of an exit code alone is taken where there is no other.
    """
    said = sorted((line for line in lines if re.search(r"\w", line)),  # no line of dashes
                  key=lambda line: not re.search(EXIT_CODE, line, re.IGNORECASE))
    for pattern, meaning in COMPLAINTS:
        for line in said:
            if found := re.search(pattern, line):
                return (meaning and f"{meaning} ({line.strip()})") or found["said"]
    return said[-1].strip() if said else ""


def means_failure(line: str) -> bool:
    """Whether a line tells why a host does not start, and not merely that something is odd."""
    return any(re.search(pattern, line) for pattern, _ in COMPLAINTS)


def names(line: str, host: str) -> bool:
    """Whether a line names a host, and not another one whose name contains it."""
    if found := re.search(BANNER_HOST, line):
        return f"{found[1]}.".startswith(f"{host}.") or f"{host}.".startswith(f"{found[1]}.")  # with or without a domain
    return re.search(rf"(?<![\w.-])(?:slurmstepd-)?{re.escape(host)}(?![\w-])", line) is not None


def host_of_step(line: str) -> str:
    """Return the host whose daemon of Slurm says a line; empty for another line."""
    found = re.match(r"slurmstepd-(\S+): ", line)
    return found[1] if found else ""
