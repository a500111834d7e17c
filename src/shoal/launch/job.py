"""The job, as every host gets it: the hosts, the environment, the program, and how to reach the launcher."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from shoal.cluster.hostfile import Host
from shoal.launch.launch_plan import LaunchPlan

__all__ = ["ClusterJob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """One job, as it travels to each of its hosts: as JSON, on standard input or in a file that only its owner reads."""

    secret: str
    """The secret name of the job: a process that knows it has read this file."""
    hosts: tuple[Host, ...]
    environment: dict[str, str]
    """Variables that the job adds to those of each host; bytes that are not UTF-8 are surrogates, as in `os.environ`."""
    folder: str
    """The working folder."""
    plan: LaunchPlan | None
    """The program and its options; None: the hosts are examined only."""
    addresses: tuple[str, ...] = ()
    """Addresses of the launcher; empty: it is at the other end of standard input."""
    port: int = 0
    """The launcher's port."""
    least: int
    """The fewest hosts with which the job goes on where others are lost."""
    quiet: float
    """Seconds without a message after which either end takes the other for dead."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return sum(len(host.slots) for host in self.hosts)

    def encode(self) -> bytes:
        """Return the job as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, text: bytes) -> ClusterJob:
        """Return the job that `encode` wrote."""
        values: dict[str, Any] = json.loads(text)
        values["hosts"] = tuple(Host(name=host["name"], slots=tuple(host["slots"])) for host in values["hosts"])
        values["addresses"] = tuple(values["addresses"])
        if (plan := values["plan"]) is not None:
            plan |= {name: tuple(plan[name]) for name in ("args", "nodes", "core_list")}
            values["plan"] = LaunchPlan(**plan)
        return cls(**values)
