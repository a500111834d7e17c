"""Bytes that this process put on the wire, counted by the kernel: one yardstick for every system.

gloo moves everything over TCP sockets, also on one machine. Linux keeps for each socket the bytes that were acknowledged
(`tcp_info`, include/uapi/linux/tcp.h), which counts a byte once however often it was sent; their sum over the process's own
sockets is what it sent, once nothing is on its way. (The bytes sent without those sent again are more than that where a full
queue of the own host refuses a segment, for its next attempt counts as a first one.) Bytes of a socket closed meanwhile are
lost to the count; gloo keeps its sockets open.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time

_BYTES_ACKED = 120  # offset of tcpi_bytes_acked; Linux 4.1 and later
_LENGTH = _BYTES_ACKED + 8


def bytes_sent() -> int:
    """Return the bytes that the open TCP sockets of this process have sent so far and the others acknowledged."""
    return sum(_sent(int(name)) for name in os.listdir("/proc/self/fd"))


def settled_bytes_sent(quiet: float = 0.3) -> int:
    """Return `bytes_sent` once it has not moved for `quiet` seconds: nothing is in flight any more."""
    sent, since = bytes_sent(), time.monotonic()
    while time.monotonic() - since < quiet:
        time.sleep(0.02)
        now = bytes_sent()
        if now != sent:
            sent, since = now, time.monotonic()
    return sent


def _sent(descriptor: int) -> int:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                return 0
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
    except OSError:  # the descriptor of the listing itself, or one closed since
        return 0
    if len(info) < _LENGTH:
        raise RuntimeError("this kernel does not count bytes per socket (Linux 4.1 or later does)")
    (acknowledged,) = struct.unpack_from("Q", info, _BYTES_ACKED)
    return acknowledged
