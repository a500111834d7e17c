"""The link of a host: a token bucket at both of its ends, so that neither sending nor receiving exceeds the rate.

What the two numbers of a token bucket do to the rate that is reached, and how they are chosen; the percentages are of
`hosts.py --check`, on the machine of docs/measurements.md:

- *burst*, the bytes that may leave at once. It must hold one segment of the kernel's offload (64 KiB and its headers),
  or every segment is cut into packets, for twice the processor time; and what the rate moves while the timer is late, or
  those bytes are lost for good: of 10 Gbit/s 16 KiB reached 43 %, 72 KiB 89 %, 1 ms of the rate 95.6 %. So 72 KiB, or
  1 ms of the rate where that is more (from 590 Mbit/s).
- *latency*, how long the queue may be; what finds it full is dropped. A long one does harm: the acknowledgements of
  one direction wait behind the data of the other. Of 50 Mbit/s, both ways at once, a queue of 50 ms reached 91 %, of
  20 ms 92 %, of 5 ms 95.4 %. So 5 ms, or a round trip of the delay where that is more: a queue shorter than that would
  starve the sender after each loss.

The rate counts bytes of Ethernet frames: of 1,514 of them TCP carries 1,448, so that 95.6 % of it is the most to reach.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

UNLIMITED = "unlimited"
UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
LOWEST, HIGHEST = 1e5, 1e11  # bits a second: below, one burst is seconds of the rate; above, no machine keeps up
SEGMENT = 72 << 10
TIMER = 1e-3  # seconds that a timer may be late
QUEUE = 5.0  # milliseconds
FRAME, PAYLOAD = 1514, 1448  # bytes of a full Ethernet frame at an MTU of 1500, and what TCP carries of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A rate in bits a second, or none, and a delay each way in milliseconds."""

    rate: float | None
    delay: float = 0.0

    @property
    def bucket(self) -> tuple[str, ...]:
        """The token bucket, in the words of tc; nothing where there is no limit."""
        if self.rate is None:
            return ()
        burst = max(SEGMENT, round(self.rate / 8 * TIMER))
        queue = max(QUEUE, 2 * self.delay)
        return "tbf", "rate", f"{self.rate:.0f}bit", "burst", str(burst), "latency", f"{queue * 1e3:.0f}us"

    @property
    def delayed(self) -> tuple[str, ...]:
        """The delay, in the words of tc; its limit is far above what can be on the way."""
        return ("netem", "delay", f"{self.delay * 1e3:.0f}us", "limit", "1000000") if self.delay else ()


def rate(text: str) -> float | None:
    """Return the bits a second of a text such as `200mbit` or `2.5gbit`; None for `unlimited`."""
    if text == UNLIMITED:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text.lower())
    bits = float(found[1]) * UNITS[found[2]] if found else 0.0
    if not LOWEST <= bits <= HIGHEST:
        raise ValueError(f"rate: got {text!r}; a number with bit, kbit, mbit or gbit from 100kbit to 100gbit is expected, "
                         f"such as 200mbit, or {UNLIMITED}")
    return bits


def delay(text: str) -> float:
    """Return the milliseconds of a text such as `5ms` or `500us`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.lower())
    if not found:
        raise ValueError(f"delay: got {text!r}; a number with us, ms or s is expected, such as 5ms")
    return float(found[1]) * MILLISECONDS[found[2]]
