"""The checks of a folder for swap files."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import TierError
from shoal.tier import folder_check
from shoal.tier.folder_check import check_folder, free_bytes, slow_reason

MOUNTS = """\
22 1 254:1 / / rw,relatime - ext4 /dev/vda1 rw
23 22 0:21 / /run rw shared:1 - tmpfs tmpfs rw
24 22 0:22 / /home/some\\040one rw - nfs4 server:/home rw
25 22 8:17 / /disk rw - xfs /dev/sdb1 rw
26 22 0:30 / /over rw - tmpfs tmpfs rw
27 26 254:1 / /over rw - ext4 /dev/vda1 rw
28 22 252:0 / /guest rw - ext4 /dev/vdb rw
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with several mounts, a partition of a fast disk (254:1) and one of a rotational disk (8:17)."""
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    for disk, rotates in (("vda", "0"), ("sdb", "1")):
        (tmp_path / disk / f"{disk}1").mkdir(parents=True)
        (tmp_path / disk / "queue").mkdir()
        (tmp_path / disk / "queue" / "rotational").write_text(f"{rotates}\n")
    (tmp_path / "devices").mkdir()
    (tmp_path / "virtio0" / "vdb" / "queue").mkdir(parents=True)
    (tmp_path / "virtio0" / "vdb" / "queue" / "rotational").write_text("1\n")
    (tmp_path / "devices" / "252:0").symlink_to(tmp_path / "virtio0" / "vdb")
    (tmp_path / "devices" / "254:1").symlink_to(tmp_path / "vda" / "vda1")
    (tmp_path / "devices" / "8:17").symlink_to(tmp_path / "sdb" / "sdb1")
    monkeypatch.setattr(folder_check, "MOUNTS", table)
    monkeypatch.setattr(folder_check, "DEVICES", tmp_path / "devices")
    return tmp_path


@pytest.mark.parametrize(("path", "reason"), [
    ("/opt/swap", None),
    ("/run/user", "is memory, not a disk (tmpfs at /run): offload to it saves no memory"),
    ("/home/some one/swap", "is on a network file system (nfs4 at /home/some one)"),
    ("/disk/swap", "is on a rotational disk (device 8:17 at /disk)"),
    ("/diskette", None),
    ("/over/it", None),
    ("/guest", None),
])  # fmt: skip
def test_a_slow_folder_is_detected_by_its_mount(path: str, reason: str | None, machine: Path) -> None:
    assert slow_reason(path) == reason


def test_without_a_mount_table_no_folder_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_check, "MOUNTS", tmp_path / "none")
    assert slow_reason(tmp_path) is None


def test_free_bytes_are_those_of_the_file_system(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) > 0


def test_a_writable_folder_passes(tmp_path: Path) -> None:
    check_folder(tmp_path)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TierError, match=r"none does not exist; make it, or give a folder of a fast local disk in nvme_path"):
        check_folder(tmp_path / "none")


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match=r"file is not a folder; give a folder of a fast local disk in nvme_path"):
        check_folder(str(tmp_path / "file"))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", _refused)  # root may write to any folder
    with pytest.raises(TierError, match=r"is not writable for this user; change its mode, or give a folder"):
        check_folder(tmp_path)


def _refused(path: Path, mode: int) -> bool:
    return False


def test_another_system_than_linux_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(TierError, match="offload to a disk requires Linux; this is darwin"):
        check_folder(tmp_path)
