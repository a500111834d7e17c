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
    """The launches of the test; all of their remaining processes are killed after the test."""
    launches: list[Launched] = []
    yield launches
    for launched in launches:
        launched.kill()


@pytest.fixture
def start(started: list[Launched]) -> Start:
    """Return a function that starts a command."""

    def begin(*command: str, **variables: str) -> Launched:
        started.append(execute(*command, **variables))
        return started[-1]

    return begin


@pytest.fixture
def run(started: list[Launched]) -> Start:
    """Return a function that starts `shoal run` with the given arguments."""

    def begin(*args: str, **variables: str) -> Launched:
        started.append(fork("run", *args, **variables))
        return started[-1]

    return begin


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that writes a script and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def free_port() -> int:
    """A port of this machine that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def mpirun() -> tuple[str, ...]:
    """The command of the MPI launcher, with the option to start more ranks than cores."""
    path = shutil.which("mpirun")
    if path is None:
        pytest.skip("needs mpirun; apt-get install openmpi-bin")
    if "Open MPI" not in subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout:
        return (path,)
    return (path, "--oversubscribe", *(["--allow-run-as-root"] if os.getuid() == 0 else []))
