"""Measure the links between hosts against the rate that was set: a stream one way, streams both ways, and round trips.

TCP carries 1,448 of the 1,514 bytes of an Ethernet frame, so 95.6 % is the most; 93 % is the least that is accepted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import link
from progress import progress
from results import Outcome, Sheet, Target

if TYPE_CHECKING:
    from hosts import Hosts

RATES = ("50mbit", "100mbit", "200mbit", "500mbit", "1gbit", "2.5gbit", "10gbit", link.UNLIMITED)
STREAM = Path(__file__).with_name("stream.py")
SECONDS = 3.0
LEAST = 0.93


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Measurements between host 0 and host 1 at one rate: bits a second, and milliseconds of the median small round trip."""

    rate: str
    one_way: float
    both_ways: float
    """The slower of the two directions."""
    idle: float
    loaded: float
    """While a stream goes one way."""

    @property
    def asked(self) -> float:
        """Bits a second that were asked for; infinite where there is no limit."""
        return link.rate(self.rate) or float("inf")


def check(hosts: Hosts, rates: Sequence[str], *, out: Path | None = None) -> None:
    """Measure between the first two hosts, print what was reached at each rate and write it down."""
    with progress() as tell:
        found = [measure(hosts, rate, tell=tell) for rate in rates]
    rows = tuple((each.rate, f"{each.one_way / 1e6:,.1f}", _share(each.one_way, each.asked), f"{each.both_ways / 1e6:,.1f}",
                  _share(each.both_ways, each.asked), f"{each.idle:.2f}", f"{each.loaded:.2f}") for each in found)
    columns = ("asked", "one way, Mbit/s", "of asked", "both ways, Mbit/s", "of asked", "round trip idle, ms", "loaded, ms")
    targets = tuple(Target(what=f"{each.rate}: share reached {way}", measured=value / each.asked, low=LEAST, high=1.0)
                    for each in found if each.asked < float("inf")
                    for way, value in (("one way", each.one_way), ("both ways", each.both_ways)))
    note = (f"A TCP stream of {SECONDS:g} s between two hosts, its first tenth not counted; the slower of two streams in "
            f"opposite directions; the median round trip of 1 byte, alone and beside the one stream.")
    Outcome(benchmark="hosts", command=" ".join(["python", *sys.argv]), note=note, targets=targets,
            sheets=(Sheet(title="Rates of links", columns=columns, rows=rows),),
            raw=[asdict(each) for each in found]).publish(out)


def measure(hosts: Hosts, rate: str, *, seconds: float = SECONDS, tell: Callable[[str], None]) -> Reached:
    """Set the rate and measure what is reached of it."""
    hosts.set_rate(rate)
    tell(f"{rate}: one way")
    sender, receiver, *_ = (lines[0] for lines in hosts.launch([STREAM, "one", str(seconds)], seconds=60 + 10 * seconds))
    tell(f"{rate}: both ways")
    both = [lines[0]["bits"] for lines in hosts.launch([STREAM, "both", str(seconds)], seconds=60 + 10 * seconds)[:2]]
    return Reached(rate=rate, one_way=receiver["bits"], both_ways=min(both), idle=sender["idle"], loaded=sender["loaded"])


def _share(bits: float, asked: float) -> str:
    return f"{bits / asked:.1%}" if asked < float("inf") else ""
