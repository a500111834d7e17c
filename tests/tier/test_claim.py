"""A swap file belongs to one process: others keep it while its owner lives, and remove it afterwards."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shoal.tier.claim as claim_module
from shoal.errors import TierError
from shoal.log import _warned  # pyright: ignore[reportPrivateUsage]
from shoal.tier.claim import _remove_stale  # pyright: ignore[reportPrivateUsage]
from shoal.tier.swap import Swap

from .test_disk_span import filled, numbers

PROLOGUE = """
import os, sys, signal, torch
from shoal.tier.swap import Swap
from shoal.tier.disk_span import DiskSpan
swap = Swap(sys.argv[1], block_bytes=65536)
span = DiskSpan(swap, 4 << 20, torch.float32, "w")
span.fetch(fresh=True).wait()
span.tensor.fill_(7)
"""
KILLED = PROLOGUE + "span.commit().wait(); os.kill(os.getpid(), signal.SIGKILL)"
EXITS_WRITING = PROLOGUE + "span.commit(); span.fetch(); span.commit(); sys.exit(3)"
EXITS_READING = PROLOGUE + "span.commit().wait(); span.fetch(); raise SystemExit(3)"
FORKS = PROLOGUE + """
span.commit().wait()
if os.fork() == 0:
    try:
        span.fetch().wait()
    except Exception as error:
        print(type(error).__name__, error)
    sys.exit(0)
assert os.wait()[1] == 0 and swap.path.exists()
span.fetch().wait()
assert span.tensor.eq(7).all()
"""
LIVES = PROLOGUE + "span.commit().wait(); print('ready', flush=True); input(); span.fetch().wait(); print(span.tensor.sum())"


def started(code: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], text=True, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture
def no_warnings_yet() -> Iterator[None]:
    before = set(_warned)
    _warned.clear()
    yield
    _warned.update(before)


def test_the_next_run_removes_the_files_of_a_killed_run(tmp_path: Path) -> None:
    process = started(KILLED, tmp_path)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    swap = Swap(tmp_path)
    assert list(tmp_path.iterdir()) == [swap.path.parent] != [left]
    swap.close()


def test_two_runs_share_a_folder_without_interference(tmp_path: Path) -> None:
    other = started(LIVES, tmp_path)
    assert other.stdout is not None and other.stdout.readline() == "ready\n"
    second = Swap(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    span = filled(second)
    span.fetch().wait()
    assert torch.equal(span.tensor, numbers(span))
    second.close()
    output, errors = other.communicate("\n")
    assert output == f"tensor({7 * (4 << 20)}.)\n", errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [EXITS_WRITING, EXITS_READING], ids=["writes", "reads"])
def test_an_interpreter_exits_during_transfers_and_leaves_no_file(code: str, tmp_path: Path) -> None:
    process = started(code, tmp_path)
    assert process.communicate() == ("", "") and process.returncode == 3
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_neither_reads_nor_removes_the_file(tmp_path: Path) -> None:
    process = started(FORKS, tmp_path)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert output.startswith("TierError w rests in ") and "forked from it. Read the state in the training process" in output
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_removed_with_its_last_span(tmp_path: Path) -> None:
    span = filled(Swap(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
    del span
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("network", [False, True])
def test_stale_folders_are_removed_of_other_hosts_only_on_local_disks(
        network: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_module, "is_network", lambda path: network)
    host = os.uname().nodename
    stale = [f"shoal-swap-{host}-12-0123abcd", f"shoal-swap-{host}-13-0123abcd"]
    elsewhere = [f"shoal-swap-{host}-more-12-0123abcd", "shoal-swap-elsewhere.-12-0123abcd"]
    others = [f"shoal-swap-{host}-12", "mine"]
    for name in (*stale, *elsewhere, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank0.swap").touch()
    (tmp_path / stale[1] / "rank0.swap").unlink()
    _remove_stale(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*others, *(elsewhere if network else [])}


@pytest.mark.parametrize("refused_at", ["open", "write"])
def test_without_direct_io_the_page_cache_is_used_with_one_warning(
        refused_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
        no_warnings_yet: None) -> None:
    opened, written = os.open, os.pwrite

    def refusing_open(path: os.PathLike[str] | str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *rest)

    def refusing_write(*args: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    if refused_at == "open":
        monkeypatch.setattr(os, "open", refusing_open)
    else:
        monkeypatch.setattr(os, "pwrite", refusing_write)
    with caplog.at_level(logging.WARNING, logger="shoal"):
        swaps = [Swap(tmp_path), Swap(tmp_path)]
    monkeypatch.setattr(os, "pwrite", written)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} does not support direct I/O (Invalid argument): swap files use the page cache, which takes memory and "
        f"processor time. Give a folder of a local disk (ext4, xfs) in nvme_path"]
    for swap in swaps:
        assert not swap.direct
        span = filled(swap)
        span.fetch().wait()
        assert torch.equal(span.tensor, numbers(span))
        swap.close()


def test_a_file_that_cannot_be_created_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(TierError, match=f"rank 5: could not create a file in {tmp_path}: No space left on device; give a "):
        Swap(tmp_path, rank=5)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TierError, match=f"{tmp_path}/none does not exist; make it, or give a folder of a fast local disk"):
        Swap(tmp_path / "none")


def test_without_locks_no_stale_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / f"shoal-swap-{os.uname().nodename}-12-0123abcd"
    left.mkdir()

    def unlockable(*args: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", unlockable)
    swap = Swap(tmp_path)
    swap.close()
    assert list(tmp_path.iterdir()) == [left]
