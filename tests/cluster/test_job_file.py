"""The file that carries a job to its hosts, with this machine as the only host."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cluster.hostfile import Host
from shoal.cluster.launchers import Launcher, Start
from shoal.launch.protocol import Beat, Exited, Message
from shoal.launch.selection import Selection


def local(render_job: str | None = None, *, stdin: bool = False) -> Selection:
    """Return a selection of this machine; `render_job` replaces the path of the job's file."""

    def render(program: str, start: Start) -> list[list[str]]:
        python, bootstrap, job = start.command
        return [[program, python, bootstrap, render_job or job, "0"]]

    row = Launcher(name="here", programs=("env",), product="", package="", render=render, variables={}, stdin=stdin)
    return Selection(hosts=(Host(name="here", slots=(0,)),), launcher=row, args=(), ssh_port=None, setup=None,
                     environment={"SECRET": "herring"}, anywhere=False, least=1, quiet=20.0)


def test_the_file_is_gone_once_every_host_has_read_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with local().cluster(None) as cluster:
        (file,) = tmp_path.glob(".shoal-job-*/*")
        assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
        with cluster:
            assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_file_is_gone_where_a_signal_ends_the_start(tmp_path: Path, number: signal.Signals) -> None:
    """`pdsh` is a program here that never starts a host."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pdsh").write_text(f"#!/bin/sh\nkill -{number} $PPID\nexec sleep 10000\n")
    (tmp_path / "bin" / "pdsh").chmod(0o755)
    (tmp_path / "work").mkdir()
    done = subprocess.run([sys.executable, "-m", "shoal", "run", "--hosts", "a:0", "--launcher", "pdsh", __file__],
                          env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}, cwd=tmp_path / "work",
                          capture_output=True, check=False, timeout=300)
    assert done.returncode == 128 + number
    assert list((tmp_path / "work").iterdir()) == []


def test_the_file_is_gone_where_a_host_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with local("no-such-file").cluster(None) as cluster, cluster:
        assert "cannot read" in cluster.nodes[0].lost
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stdin", [False, True], ids=["a socket", "standard input"])
def test_a_host_ends_once_its_connection_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stdin: bool) -> None:
    """The launcher closes that of a lost host, which ends when it comes back."""
    monkeypatch.chdir(tmp_path)
    with local(stdin=stdin).cluster(None) as cluster, cluster:
        (host,) = cluster.nodes
        assert host.channel is not None
        host.channel.close()
        said: list[Message] = []
        while not host.has_ended:
            if (came := cluster.receive()) is not None and came[1] != Beat():
                said.append(came[1])
        assert said == [Exited(code=0)], "no word of a launcher that was silent for `quiet` seconds"
