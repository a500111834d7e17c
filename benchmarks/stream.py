"""A rank of `hosts.py --check`: rank 0 streams to rank 1, with `both` rank 1 to rank 0 as well, and counts round trips.

Each prints a line of JSON: bits a second that it received, and rank 0 the milliseconds of a round trip of one byte,
before the stream and beside it.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

CHUNK = bytes(1 << 18)
IDLE = 0.3  # seconds of round trips before the stream
BETWEEN = 0.005  # seconds from one round trip to the next
PATIENCE = 30.0  # seconds for the other rank to come


def main() -> None:
    both, seconds, rank = sys.argv[1] == "both", float(sys.argv[2]), int(os.environ["RANK"])
    if rank > 1:
        return
    found: dict[str, float] = {}
    with ExitStack() as stack:
        data, bell = (stack.enter_context(each) for each in _connections(listen=rank == 0))
        bell.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if rank == 0:
            found["idle"] = _during(bell, lambda: time.sleep(IDLE))
            data.sendall(b"!")  # now
        else:
            threading.Thread(target=_answer, args=(bell,), daemon=True).start()
            data.recv(1)
        receiving = threading.Thread(target=lambda: found.update(bits=_receive(data, 0.1 * seconds)))
        if rank == 1 or both:
            receiving.start()
        if rank == 0:
            found["loaded"] = _during(bell, lambda: _send(data, seconds))
        elif both:
            _send(data, seconds)
        if receiving.ident:
            receiving.join()
    sys.stdout.write(json.dumps(found) + "\n")


def _connections(*, listen: bool) -> tuple[socket.socket, socket.socket]:
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if listen:
        with socket.create_server(where) as server:
            server.settimeout(PATIENCE)
            return server.accept()[0], server.accept()[0]
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection(where), socket.create_connection(where)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _send(connection: socket.socket, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(CHUNK)
    connection.shutdown(socket.SHUT_WR)


def _receive(connection: socket.socket, uncounted: float) -> float:
    """Return the bits a second from `uncounted` seconds after the first byte to the last byte."""
    buffer, counted, start = bytearray(1 << 20), 0, 0.0
    begin = connection.recv_into(buffer) and time.monotonic()
    while size := connection.recv_into(buffer):
        now = time.monotonic()
        if start:
            counted += size
        elif now - begin >= uncounted:
            start = now
    return 8 * counted / (time.monotonic() - start)


def _during(bell: socket.socket, work: Callable[[], None]) -> float:
    """Return the milliseconds of the median round trip while `work` runs."""
    trips: list[float] = []
    ready = threading.Event()

    def ring() -> None:
        while not ready.is_set():
            start = time.monotonic()
            bell.sendall(b"?")
            bell.recv(1)
            trips.append(1e3 * (time.monotonic() - start))
            time.sleep(BETWEEN)

    ringing = threading.Thread(target=ring)
    ringing.start()
    work()
    ready.set()
    ringing.join()
    return statistics.median(trips)


def _answer(bell: socket.socket) -> None:
    while word := bell.recv(1):
        bell.sendall(word)


if __name__ == "__main__":
    main()
