"""Addresses under which other hosts may reach this one, and the one under which a host is reached. No name must resolve."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

__all__ = ["INTERFACE", "address_of", "connect", "facing", "interface_of", "is_loopback", "own_addresses", "resolves"]

INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names the interface of gloo; without it gloo looks up the host's own name."""

SIOCGIFADDR = 0x8915
ATTEMPT = 3.0
"""Seconds of one attempt to connect."""


def own_addresses() -> list[str]:
    """Return this host's addresses, the likeliest first: that of the ssh connection, each interface's, loopback last."""
    found = [os.environ["SSH_CONNECTION"].split()[2]] if len(os.environ.get("SSH_CONNECTION", "").split()) == 4 else []
    found += [address for _, address in _interfaces()]
    with suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return sorted(dict.fromkeys(found), key=is_loopback)


def facing(host: str) -> tuple[str, bool]:
    """Return the address with which this host reaches `host`, and whether that is this host itself.

    Raises OSError where the name does not resolve, or there is no route.
    """
    found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)  # any port: nothing is sent
    family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        own = str(probe.getsockname()[0])
    if is_loopback(own) and not is_loopback(host):  # the name of this host, which /etc/hosts gives such an address here
        return own_addresses()[0], True
    return own, own == where[0] or is_loopback(own)


def is_loopback(host: str) -> bool:
    """Whether a name or an address is one under which every host means itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def resolves(host: str) -> bool:
    """Whether a name has an address here; an address has itself."""
    try:
        return bool(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        return False


def interface_of(address: str) -> str | None:
    """Return the interface that has an address."""
    return next((name for name, own in _interfaces() if own == address), None)


def address_of(interface: str) -> str | None:
    """Return the address of an interface, None where there is none of that name."""
    return next((own for name, own in _interfaces() if name == interface), None)


def _interfaces() -> list[tuple[str, str]]:
    """Return each interface of this host that has an IPv4 address, with the address."""
    found: list[tuple[str, str]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def connect(addresses: Sequence[str], port: int, seconds: float) -> socket.socket | None:
    """Return a connection to the first of the addresses that accepts one; None if none does within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for address in addresses:
            with suppress(OSError):
                return socket.create_connection((address, port), timeout=ATTEMPT)
        time.sleep(0.05)
    return None
