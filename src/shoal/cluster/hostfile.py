"""Hosts and their slots: read from a hostfile, selected by filters and counts, always in the order of the hostfile.

A slot is the number of a device of a host, and the place of one rank. A line of a hostfile is `NAME slots=N`. A filter is
`NAME[:SLOT[,SLOT...]]`, joined by `@`; a name alone stands for all slots of the host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import HostsError

__all__ = ["Host", "excluded", "first", "included", "limited", "parse_filter", "parse_hosts", "parse_lines", "read"]

MOST_SLOTS = 4096
"""Slots that one host may have: more are a slip of the pen."""
DIGITS = 9
"""The most digits of a number of slots that are read."""
FILTER = "write NAME[:SLOT[,SLOT...]] joined by @, such as node0@node1:0,2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host, by the name that the launcher reaches it with, and the slots that the job uses on it."""

    name: str
    slots: tuple[int, ...]


def read(path: Path) -> list[Host]:
    """Read a hostfile. Raises `HostsError` naming the file and the line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise HostsError(f"{path}: cannot be read as a hostfile: {reason}; write lines of `NAME slots=N`") from None
    return parse_lines(text.splitlines(), str(path))


def parse_lines(lines: Iterable[str], source: str = "Hostfile") -> list[Host]:
    """Return the hosts of the lines of a hostfile; comments begin with `#`. Raises `HostsError` naming the line."""
    counts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        where, found = f"{source}, line {number}", re.fullmatch(r"(\S+)\s+slots=(\d+)", text)
        if found is None:
            raise HostsError(f"{where}: Hostfile contains a bad entry: {text}; write `NAME slots=N`")
        name = found[1]
        if len(found[2]) > DIGITS:  # int() takes no thousands of them, and the message shows no more
            raise HostsError(f"{where}: {name} has slots={found[2][:DIGITS]}...; choose at most {MOST_SLOTS}")
        slots = int(found[2])
        if same := next((known for known in counts if known.lower() == name.lower()), None):
            other = "" if same == name else f" (as {same}: names of hosts do not differ by case)"
            raise HostsError(f"{where}: Hostfile contains multiple entries for {name}{other}; write one line with all its "
                             "slots")
        if slots == 0:
            raise HostsError(f"{where}: {name} has slots=0; give it at least one, or remove the line")
        _check_host(where, name, slots)
        counts[name] = slots
    if not counts:
        raise HostsError(f"{source}: Hostfile is empty; write lines of `NAME slots=N`")
    return [Host(name=name, slots=tuple(range(slots))) for name, slots in counts.items()]


def _check_host(where: str, name: str, slots: int) -> None:
    """Raise `HostsError` for a name that a launcher would take for something else, and for too many slots."""
    if re.fullmatch(r"\w[\w.+-]*", name) is None:
        raise HostsError(f"{where}: {name} is no name of a host; it has letters, digits, _ . - and +, and begins with none "
                         "of the last three; give an IPv6 address, a user or a port a name in ~/.ssh/config (Host, "
                         "HostName, User, Port)")
    if slots > MOST_SLOTS:
        raise HostsError(f"{where}: {name} has {slots} slots; choose at most {MOST_SLOTS}")


def parse_filter(text: str, option: str = "the filter") -> dict[str, tuple[int, ...]]:
    """Return the slots that a filter names on each host, none where it also names the host alone. Raises `HostsError`."""
    named: dict[str, tuple[int, ...]] = {}
    for each in filter(None, (part.strip() for part in text.split("@"))):
        name, colon, listed = each.partition(":")
        slots = listed.split(",") if colon else []
        if not name or not all(slot.strip().isdecimal() for slot in slots):
            raise HostsError(f"{option}: got {each!r}: invalid literal in a filter; {FILTER}")
        before = named.get(name)
        named[name] = () if not slots or before == () else (*(before or ()), *map(int, slots))
    return named


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts of a list in the form of a filter, in which each host names its slots."""
    named = parse_filter(text, "--hosts")
    if bare := [name for name, slots in named.items() if not slots]:
        raise HostsError(f"--hosts: {bare[0]} names no slot; write {bare[0]}:0,1 for two ranks")
    if not named:
        raise HostsError(f"--hosts: got {text!r}, which names no host; {FILTER}")
    for name, slots in named.items():
        _check_host("--hosts", name, len(slots))
        if twice := [slot for slot in slots if slots.count(slot) > 1]:
            raise HostsError(f"--hosts: {name} names slot {twice[0]} twice; a slot is the place of one rank")
    return [Host(name=name, slots=slots) for name, slots in named.items()]


def included(hosts: Sequence[Host], text: str) -> list[Host]:
    """Return the hosts and slots that the filter names."""
    named = _selection(hosts, text, "--include")
    return _kept(hosts, {host.name: set(named.get(host.name, ())) for host in hosts})


def excluded(hosts: Sequence[Host], text: str) -> list[Host]:
    """Return the hosts and slots that the filter does not name."""
    named = _selection(hosts, text, "--exclude")
    return _kept(hosts, {host.name: set(host.slots) - set(named.get(host.name, ())) for host in hosts})


def first(hosts: Sequence[Host], least: int, most: int) -> list[Host]:
    """Return the first `most` hosts, or all. Raises `HostsError` where there are fewer than `least`."""
    if least > len(hosts):
        raise HostsError(f"--nodes: got {least}; choose at most {len(hosts)}, for the hosts are "
                         f"{', '.join(host.name for host in hosts)}")
    return list(hosts[:most])


def limited(hosts: Sequence[Host], ranks: int) -> list[Host]:
    """Return the hosts with their first `ranks` slots. Raises `HostsError` for a host with fewer."""
    if few := [host for host in hosts if len(host.slots) < ranks]:
        raise HostsError(f"--ranks: got {ranks}; choose at most {len(few[0].slots)}, the slots of {few[0].name}, or leave "
                         "that host out")
    return [Host(name=host.name, slots=host.slots[:ranks]) for host in hosts]


def _selection(hosts: Sequence[Host], text: str, option: str) -> Mapping[str, Sequence[int]]:
    """Return the slots that a filter names, a name alone standing for all. Raises `HostsError` for what does not exist."""
    known = {host.name: host.slots for host in hosts}
    named = parse_filter(text, option)
    for name, slots in named.items():
        if name not in known:
            raise HostsError(f"{option}: Hostname '{name}' not found in hostfile; choose from {', '.join(known)}")
        if wrong := [slot for slot in slots if slot not in known[name]]:
            raise HostsError(f"{option}: No slot '{wrong[0]}' specified on host '{name}', which has "
                             f"{', '.join(map(str, known[name]))}")
    return {name: slots or known[name] for name, slots in named.items()}


def _kept(hosts: Sequence[Host], kept: Mapping[str, set[int]]) -> list[Host]:
    left = [Host(name=host.name, slots=tuple(slot for slot in host.slots if slot in kept[host.name])) for host in hosts]
    return [host for host in left if host.slots]
