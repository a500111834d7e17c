import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launched import Launched, execute, fork

Start = Callable[..., Launched]


@pytest.fixture
def started() -> Iterator[list[Launched]]:
    """What the test started; its family is killed after the test, if anything of it is left."""
    everything: list[Launched] = []
    yield everything
    for launched in everything:
        launched.kill()


@pytest.fixture
def start(started: list[Launched]) -> Start:
    """Start a command."""

    def begin(*command: str, **variables: str) -> Launched:
        started.append(execute(*command, **variables))
        return started[-1]

    return begin


@pytest.fixture
def run(started: list[Launched]) -> Start:
    """Start `shoal run` with the arguments given."""

    def begin(*args: str, **variables: str) -> Launched:
        started.append(fork("run", *args, **variables))
        return started[-1]

    return begin


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write a script and return its path."""

    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def free_port() -> int:
    """A port of this machine that nobody listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def mpirun() -> tuple[str, ...]:
    """The MPI launcher of this machine, allowed to start more ranks than it has cores."""
    path = shutil.which("mpirun")
    if path is None:
        pytest.skip("no mpirun here; apt-get install openmpi-bin")
    if "Open MPI" not in subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout:
        return (path,)
    return (path, "--oversubscribe", *(["--allow-run-as-root"] if os.getuid() == 0 else []))
