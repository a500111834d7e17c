"""Several hosts on one machine: network namespaces, each with one link to a switch, and a rate that the kernel enforces.

    python benchmarks/hosts.py --hosts 2 --rate 200mbit -- python train.py     # on each host, with torchrun's variables
    python benchmarks/hosts.py --check                                         # rates asked for, beside rates reached

      host 0                 switch                  host 1
    eth0 10.77.0.1 ---- port0 bridge port1 ---- 10.77.0.2 eth0
         rate ->        <- rate     rate ->        <- rate

The switch is a namespace too: no firewall, route, address or name of the machine is in its way, and when the namespaces
go, everything goes. They go on every way out but SIGKILL, and the next run sweeps what that left. Linux, root (or
CAP_NET_ADMIN and CAP_SYS_ADMIN), iproute2, and `sch_tbf` in the kernel are needed, for a delay `sch_netem` too;
`HostsUnavailable` says what is missing. What is not as between machines: hosts share processor, memory and disk.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import link
import link_rates
from interrupts import deferred, leaving
from namespaces import HostsUnavailable, entering, make, name, remove, sweep, tool, why_not
from rank_group import Rank, RankFailed, end, finish

INTERFACE = "eth0"
COUNTERS = f"/sys/class/net/{INTERFACE}/statistics"
SWITCH = "bridge"
MOST = 250  # addresses of the network
FIRST_PORT = 29500
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that a host has sent and received on its interface, headers included (one of 66 bytes for up to 64 KiB)."""

    sent: int
    received: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(sent=self.sent - earlier.sent, received=self.received - earlier.received)


class Hosts:
    """`count` hosts that reach each other at `rate` each way (`200mbit`, `unlimited`), after `delay` (`5ms`) if given.

    Enter it to build them, which raises `HostsUnavailable` where that cannot be; leaving it kills what runs on them. In
    the main thread SIGTERM and SIGHUP leave it too, where nothing else handles them.
    """

    names: list[str]
    """The namespaces of the hosts."""

    def __init__(self, count: int, *, rate: str = link.UNLIMITED, delay: str | None = None) -> None:
        if not 1 <= count <= MOST:
            raise ValueError(f"hosts: got {count}; 1 to {MOST} can be made")
        self.count = count
        self._link = link.Link(rate=link.rate(rate), delay=link.delay(delay) if delay else 0.0)
        number = next(_numbers)
        self._switch = name(number, "switch")
        self.names = [name(number, f"host{host}") for host in range(count)]
        self._queued: set[tuple[str, str]] = set()
        self._ports = itertools.count(FIRST_PORT)
        self._leave = ExitStack()

    def __enter__(self) -> Self:
        if reason := why_not():
            raise HostsUnavailable(reason)
        sweep()
        with ExitStack() as leave:
            leave.enter_context(leaving())
            leave.callback(self._remove)
            self._build()
            self._shape()
            self._leave = leave.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave.close()

    def address(self, host: int) -> str:
        """Return the address at which the other hosts reach this one."""
        return f"10.77.0.{host + 1}"

    def set_rate(self, rate: str) -> None:
        """Change the rate of every link. What waits in a queue is dropped, so no rank should be in the middle of a step."""
        self._link = link.Link(rate=link.rate(rate), delay=self._link.delay)
        self._shape()

    @contextmanager
    def cut(self, hosts: Sequence[int]) -> Generator[None]:
        """Have these hosts not reach each other meanwhile; they and all others reach each other as before."""
        words = ("bridge", "-n", self._switch, "link", "set", "dev")
        try:
            for host in hosts:
                tool(*words, f"port{host}", "isolated", "on")
            yield
        finally:
            for host in hosts:
                tool(*words, f"port{host}", "isolated", "off")

    def bytes(self, host: int) -> Traffic:
        """Return what the host's interface has counted since it was built."""
        sent, received = self.run(host, ["cat", f"{COUNTERS}/tx_bytes", f"{COUNTERS}/rx_bytes"]).stdout.split()
        return Traffic(sent=int(sent), received=int(received))

    def run(self, host: int, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None,
            seconds: float | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end and return its output; raises CalledProcessError or TimeoutExpired."""
        with self.popen(host, command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                output, errors = process.communicate(timeout=seconds)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(list(map(str, command)), process.returncode, output, errors)
        done.check_returncode()
        return done

    def popen(self, host: int, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None,
              **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host, with `env` added to this process's variables; `options` are those of Popen.

        gloo and NCCL are told which interface to use. The kernel kills the command when the thread that calls this ends.
        """
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE, **(env or {})}
        return subprocess.Popen(entering(self.names[host], *command), env=variables, **options)

    def launch(self, script: Sequence[str | Path], ranks_per_host: int = 1, *, env: Mapping[str, str] | None = None,
               seconds: float = 600.0) -> list[list[dict[str, Any]]]:
        """Run a Python script, with its arguments, as ranks on every host; return the JSON lines that each printed, by rank.

        Raises `rank_group.RankFailed`, with what the ranks said, when one ends badly or after `seconds`; then all are ended.
        """
        with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
            ranks = self.start([sys.executable, *script], ranks_per_host, env=env, folder=Path(folder))
            finish(ranks, seconds)
            return [rank.results() for rank in ranks]

    def start(self, command: Sequence[str | Path], ranks_per_host: int = 1, *, env: Mapping[str, str] | None = None,
              folder: Path | None = None) -> list[Rank]:
        """Start a command as ranks on every host; they write to files in `folder`, or where this process writes."""
        port, ranks = next(self._ports), list[Rank]()
        try:
            for number in range(self.count * ranks_per_host):
                host, local = divmod(number, ranks_per_host)
                variables = {**self.variables(host, local, ranks_per_host, port), **(env or {})}
                ranks.append(self._rank(host, command, variables, folder / str(number) if folder else None))
        except BaseException:
            end(ranks)
            raise
        return ranks

    def variables(self, host: int, local: int, ranks_per_host: int, port: int) -> dict[str, str]:
        """Return the variables that torchrun sets for a rank."""
        return {"RANK": str(host * ranks_per_host + local), "WORLD_SIZE": str(self.count * ranks_per_host),
                "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(ranks_per_host), "GROUP_RANK": str(host),
                "MASTER_ADDR": self.address(0), "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}

    def _rank(self, host: int, command: Sequence[str | Path], variables: Mapping[str, str], path: Path | None) -> Rank:
        if path is None:
            return Rank(host=host, process=self.popen(host, command, env=variables))
        output, errors = path.with_suffix(".out"), path.with_suffix(".err")
        with output.open("w") as out, errors.open("w") as err:
            process = self.popen(host, command, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        return Rank(host=host, process=process, output=output, errors=errors)

    def _build(self) -> None:
        switch = ("ip", "-n", self._switch, "link")
        make(self._switch)
        tool(*switch, "add", SWITCH, "type", "bridge")
        self._up(*switch, "set", SWITCH)
        for host, namespace in enumerate(self.names):
            make(namespace)
            tool(*switch, "add", f"port{host}", "type", "veth", "peer", "name", INTERFACE, "netns", namespace)
            self._up(*switch, "set", f"port{host}", "master", SWITCH)
            tool("ip", "-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            self._up("ip", "-n", namespace, "link", "set", INTERFACE)

    def _up(self, *command: str) -> None:
        """Bring a link up without an IPv6 address, so that it solicits no routers between the bytes that are counted.

        The address mode is set first: in one command the kernel brings the link up before it reads the mode.
        """
        tool(*command, "addrgenmode", "none")
        tool(*command, "up")

    def _shape(self) -> None:
        """Queue at both ends of every cable: the rate at each, the delay at the switch, so that it counts once each way."""
        for host, namespace in enumerate(self.names):
            self._queue(namespace, INTERFACE, self._link.bucket)
            self._queue(self._switch, f"port{host}", self._link.delayed, self._link.bucket)

    def _queue(self, namespace: str, device: str, *kinds: tuple[str, ...]) -> None:
        """Replace the queues of a device, one within the other; an empty one stands for none."""
        words = ("tc", "-n", namespace, "qdisc")
        if (namespace, device) in self._queued:
            tool(*words, "delete", "dev", device, "root")
            self._queued.remove((namespace, device))
        where: tuple[str, ...] = ("root",)
        for handle, kind in enumerate(filter(None, kinds), start=1):
            tool(*words, "add", "dev", device, *where, "handle", f"{handle}:", *kind)
            self._queued.add((namespace, device))
            where = "parent", f"{handle}:1"

    def _remove(self) -> None:
        with deferred():
            for namespace in (*self.names, self._switch):
                remove(namespace)


def unavailable() -> str:
    """Try to build hosts; say why that fails, or nothing where it does not."""
    try:
        with Hosts(2, rate="100mbit"):
            return ""
    except HostsUnavailable as error:
        return str(error)


def main() -> None:
    options = _options()
    try:
        with Hosts(options.hosts, rate=options.rate, delay=options.delay) as hosts:
            if options.check:
                link_rates.check(hosts, options.rates, out=options.out)
            else:
                finish(hosts.start(options.command, options.ranks), seconds=float("inf"))
    except HostsUnavailable as reason:
        if not options.check:
            sys.exit(f"hosts: {reason}")
        sys.stderr.write(f"skipped: {reason}\n")
    except RankFailed as failure:
        sys.exit(f"hosts: {failure}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="how many (2)")
    parser.add_argument("--ranks", type=int, default=1, help="processes on each host (1)")
    parser.add_argument("--rate", default=link.UNLIMITED, help="of each link, each way: 200mbit, 2.5gbit ... (unlimited)")
    parser.add_argument("--delay", help="of each link, each way: 5ms ... (none)")
    parser.add_argument("--check", action="store_true", help="measure what is reached of --rates")
    parser.add_argument("--rates", nargs="+", default=link_rates.RATES, metavar="RATE",
                        help=f"rates to check ({' '.join(link_rates.RATES)})")
    parser.add_argument("--out", type=Path, help="where the JSON of --check goes (out/benchmarks/hosts.json)")
    parser.add_argument("command", nargs="*", help="what every rank runs, after --")
    options = parser.parse_args()
    if bool(options.command) == options.check:
        parser.error("give a command after --, or --check")
    return options


if __name__ == "__main__":
    main()
