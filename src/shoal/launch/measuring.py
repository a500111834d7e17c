"""The rate of a link: one host sends for a while, another receives and says how many bytes came."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

from shoal.launch.addresses import connect

__all__ = ["receive", "send"]

BLOCK = bytes(1 << 18)
WAIT = 20.0
"""Seconds to wait for the other host."""


def receive() -> int:
    """Listen for one sender, in a thread, and return the port."""
    listener = socket.create_server(("", 0))
    listener.settimeout(WAIT)
    threading.Thread(target=_drain, args=(listener,), name="receiver", daemon=True).start()
    return listener.getsockname()[1]


def send(addresses: Sequence[str], port: int, seconds: float) -> float:
    """Send for some seconds; return the bytes a second that arrived, 0 where no address of the receiver was reached."""
    connection = connect(addresses, port, WAIT)
    if connection is None:
        return 0.0
    with connection:
        connection.settimeout(WAIT)
        start = time.monotonic()
        try:
            while time.monotonic() < start + seconds:
                connection.sendall(BLOCK)
            connection.shutdown(socket.SHUT_WR)
            arrived = int(connection.makefile().readline() or 0)
        except OSError:
            return 0.0
        return arrived / (time.monotonic() - start)


def _drain(listener: socket.socket) -> None:
    with listener:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
    with connection:
        count, block = 0, bytearray(len(BLOCK))
        try:
            while got := connection.recv_into(block):
                count += got
            connection.sendall(f"{count}\n".encode())
        except OSError:
            return
