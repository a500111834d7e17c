"""Machines of network namespaces, with the folder of the benchmarks on the path, where they are built."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from machines import Machines
from namespaces import HostsUnavailable
from slurm import Slurm

PACKAGES = {"pdsh": "pdsh", "openmpi": "openmpi-bin", "mpich": "mpich"}
PROGRAMS = {"pdsh": "pdsh", "openmpi": "mpirun.openmpi", "mpich": "mpiexec.hydra"}


@pytest.fixture(scope="session")
def machines() -> Iterator[Machines]:
    """Three machines with a hostfile of one slot each."""
    if os.environ.get("SHOAL_TEST_CLUSTER") != "1":
        pytest.skip("takes minutes and starts daemons; make test-cluster")
    try:
        with Machines(3) as made:
            (made.folder / "hosts.txt").write_text("".join(f"{name} slots=1\n" for name in made.names))
            yield made
    except HostsUnavailable as reason:
        pytest.skip(f"needs hosts: {reason}")


@pytest.fixture(scope="session")
def slurm(machines: Machines) -> Iterator[Slurm]:
    """Slurm on the three machines."""
    try:
        with Slurm(machines) as made:
            yield made
    except HostsUnavailable as reason:
        pytest.skip(f"needs Slurm: {reason}")


@pytest.fixture
def launcher(request: pytest.FixtureRequest) -> str:
    """A launcher that is installed; Slurm runs if it is that."""
    name: str = request.param
    if name == "slurm":
        request.getfixturevalue("slurm")
    elif name in PROGRAMS and shutil.which(PROGRAMS[name]) is None:
        pytest.skip(f"needs {name}; apt-get install {PACKAGES[name]}")
    return name
