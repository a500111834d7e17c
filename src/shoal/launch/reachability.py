"""Which hosts go on together where some do not reach each other, although the launcher reaches all.

The largest set of hosts that all reach each other stays; of several such sets the one whose first hosts stand first in the
hostfile. Hosts report at different moments that a link is lost, so the choice waits until no new report has come for
`SETTLE` seconds, and until no host that it concerns is silent: that one may be lost altogether, which the launcher notices
itself.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence

__all__ = ["LostLinks", "most_that_reach"]

SETTLE = 2.0
"""Seconds without a new report until the hosts are chosen: reports of one loss differ by up to a second, a probe."""
LOOKS = 20_000
"""Sets of hosts to look at; then the largest of these is taken."""

Pair = frozenset[int]


def most_that_reach(hosts: Sequence[int], lost: Collection[Pair]) -> list[int]:
    """Return the most of `hosts` of which no two are a pair of `lost`; of equally many those that stand first.

    With very many lost links between very many hosts, the largest of the first `LOOKS` sets is returned.
    """
    cut: dict[int, set[int]] = {host: {other for pair in lost if host in pair for other in pair - {host}} for host in hosts}
    best: list[int] = []
    looks = 0
    undecided: list[tuple[list[int], list[int]]] = [([], list(hosts))]
    """Hosts that are kept, and those that may be added to them, the likeliest last."""
    while undecided and looks < LOOKS:
        kept, rest = undecided.pop()
        looks += 1
        if len(kept) + _most(rest, cut) <= len(best):
            continue
        if not rest:
            best = kept
            continue
        host, others = rest[0], rest[1:]
        if cut[host].intersection(others):
            undecided.append((kept, others))
        undecided.append(([*kept, host], [other for other in others if other not in cut[host]]))
    return best


def _most(hosts: Iterable[int], cut: dict[int, set[int]]) -> int:
    """Return a number that no set of hosts which reach each other exceeds: at most one of hosts that all lack each other."""
    groups: list[list[int]] = []
    for host in hosts:
        for group in groups if cut[host] else ():
            if cut[host].issuperset(group):
                group.append(host)
                break
        else:
            groups.append([host])
    return len(groups)


class LostLinks:
    """The links of a job that its hosts report as lost."""

    def __init__(self) -> None:
        self._unreached: dict[int, frozenset[int]] = {}
        self._seen = set[Pair]()
        """The lost links of the last look."""
        self._since = 0.0
        """When a look last found a new one."""

    def report(self, host: int, unreached: Iterable[int]) -> None:
        """Take the report of a host: those that it does not reach, in place of those of its last report."""
        self._unreached[host] = frozenset(unreached)

    def leave_out(self, hosts: Sequence[int], silent: Collection[int]) -> dict[int, list[int]]:
        """Return the hosts to go on without, each with those of the others that do not reach it; none while that is open.

        `hosts` are those that take part, in the order of the hostfile; of `silent` ones nothing has come lately.
        """
        lost = {Pair((host, other)) for host in hosts for other in self._unreached.get(host, ()) if other in hosts}
        if lost - self._seen:
            self._since = time.monotonic()
        self._seen = lost
        if not lost or time.monotonic() - self._since < SETTLE or any(pair.intersection(silent) for pair in lost):
            return {}
        kept = most_that_reach(hosts, lost)
        return {host: [other for other in kept if Pair((host, other)) in lost] for host in hosts if host not in kept}
