"""Reading the memory of another process of this machine, by the system call that Linux has for it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

_AT_ONCE = 256 << 20  # bytes of one read: the system has a limit of 2 GiB
_SET_PTRACER = 0x59616D61  # linux/prctl.h: which process may read this one, where only ancestors may


class _Vector(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_memory(process: int, source: int, target: int, size: int) -> None:
    """Copy `size` bytes at `source` of `process` to `target` of this one. Raises OSError where that is not possible."""
    if (read := _system("process_vm_readv")) is None:
        raise OSError("this system has no process_vm_readv")
    for start in range(0, size, _AT_ONCE):
        length = min(_AT_ONCE, size - start)
        here, there = _Vector(target + start, length), _Vector(source + start, length)
        count = read(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count != length:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number) if count < 0 else f"only {count} of {length} bytes were read")


def place() -> tuple[str, str, str]:
    """Return the running kernel, the network and the process numbers of this process. Raises OSError but on Linux.

    Ranks of equal kernel and network are on one machine; two networks on one machine stand for two.
    """
    return (Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/net"),
            os.readlink("/proc/self/ns/pid"))


def allow_siblings() -> None:
    """Let the other ranks, descendants of the same launcher, read this process where Yama allows it to ancestors only."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if not scope.exists() or scope.read_text().strip() != "1" or os.getppid() <= 1:
        return
    if (prctl := _system("prctl")) is not None:
        prctl(_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


@cache
def _system(name: str) -> Callable[..., int] | None:
    """Return a function of the C library, None where it has none of that name."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.restype = ctypes.c_ssize_t
    return function
