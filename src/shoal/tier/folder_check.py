"""Checks of a folder for swap files: access, free space, and whether it is on a fast local disk."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import TierError

__all__ = ["check_folder", "free_bytes", "is_network", "slow_reason"]

_NETWORK = frozenset({"9p", "afs", "beegfs", "ceph", "cifs", "fuse.sshfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs",
                      "nfs", "nfs4", "smb2", "smb3", "smbfs", "virtiofs"})
_MEMORY = frozenset({"ramfs", "tmpfs"})
_VIRTUAL = ("virtio", "vbd-", "vmbus")
MOUNTS, DEVICES = Path("/proc/self/mountinfo"), Path("/sys/dev/block")
_FIX = "give a folder of a fast local disk in nvme_path"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    """A mounted file system: its mount point, type and device."""

    point: str
    type: str
    device: str


def check_folder(path: str | Path) -> None:
    """Raise TierError unless `path` is a folder in which this process can create files."""
    if sys.platform != "linux":
        raise TierError(f"{path}: offload to a disk requires Linux; this is {sys.platform}")
    folder = Path(path)
    if not folder.exists():
        raise TierError(f"{folder} does not exist; make it, or {_FIX}")
    if not folder.is_dir():
        raise TierError(f"{folder} is not a folder; {_FIX}")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise TierError(f"{folder} is not writable for this user; change its mode, or {_FIX}")


def free_bytes(path: str | Path) -> int:
    """Return the bytes available to this user on the file system of `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def is_network(path: str | Path) -> bool:
    """Whether `path` is on a network file system."""
    mount = _mount_of(Path(path).resolve(), Path("/proc/self/mountinfo"))
    return mount is not None and mount.type in _NETWORK


def slow_reason(path: str | Path) -> str | None:
    """Return why `path` is a slow place for state, as "is ..."; None if it is not."""
    mount = _mount_of(Path(path).resolve(), MOUNTS)
    if mount is None:
        return None
    if mount.type in _MEMORY:
        return f"is memory, not a disk ({mount.type} at {mount.point}): offload to it saves no memory"
    if mount.type in _NETWORK:
        return f"is on a network file system ({mount.type} at {mount.point})"
    if _is_rotational(mount.device, DEVICES):
        return f"is on a rotational disk (device {mount.device} at {mount.point})"
    return None


def _mount_of(path: Path, table: Path) -> _Mount | None:
    """Return the mount that contains `path`: the deepest one, and of several on one mount point the last."""
    found: _Mount | None = None
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields, _, source = line.partition(" - ")
        words = fields.split()
        mount = _Mount(point=_unescaped(words[4]), type=source.split()[0], device=words[2])
        if path.is_relative_to(mount.point) and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def _unescaped(text: str) -> str:
    """Decode the octal escapes of blanks and backslashes in mountinfo."""
    return re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), text)


def _is_rotational(device: str, devices: Path) -> bool:
    """Whether the disk of a device is rotational. A partition has no queue folder; its disk, the parent folder, has one.

    Virtual disks report themselves as rotational whatever they are stored on; they count as not rotational.
    """
    sysfs = (devices / device).resolve()
    if any(part.startswith(_VIRTUAL) for part in sysfs.parts):
        return False
    for folder in (sysfs, sysfs.parent):
        try:
            return (folder / "queue" / "rotational").read_text().strip() == "1"
        except OSError:
            continue
    return False
