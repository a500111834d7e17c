"""Hosts are real: they reach each other through a link of the rate, what they move is counted, and nothing of them stays.

Where namespaces cannot be made the tests are skipped with the reason; what needs none is tested everywhere.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import link
import link_rates
import namespaces
import pytest
from hosts import Hosts, HostsUnavailable, unavailable
from rank_group import RankFailed

HERE = Path(__file__).parent
BENCHMARKS = HERE.parents[1] / "benchmarks"
MEBI = 1 << 20

missing = unavailable()
real = pytest.mark.skipif(bool(missing), reason=f"no hosts: {missing}")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def names() -> set[str]:
    """Return the namespaces of this process's networks and of those it started."""
    return {path.name for path in namespaces.MOUNTS.glob("shoal-*")}


# The rate


@pytest.mark.parametrize(("text", "bits"), [("200mbit", 2e8), ("2.5gbit", 2.5e9), ("100Kbit", 1e5), ("unlimited", None)])
def test_a_rate_is_read_in_the_words_of_tc(text: str, bits: float | None) -> None:
    assert link.rate(text) == bits


@pytest.mark.parametrize("text", ["", "200", "fast", "1kbit", "1000gbit", "-1mbit", "200mbits"])
def test_another_rate_is_refused_with_what_is_expected(text: str) -> None:
    with pytest.raises(ValueError, match=rf"rate: got '{text}'; a number with bit, kbit, mbit or gbit from 100kbit"):
        Hosts(2, rate=text)


def test_another_delay_is_refused_with_what_is_expected() -> None:
    with pytest.raises(ValueError, match="delay: got '5 minutes'; a number with us, ms or s"):
        Hosts(2, delay="5 minutes")


def test_hosts_that_have_no_address_are_refused() -> None:
    with pytest.raises(ValueError, match="hosts: got 251; 1 to 250"):
        Hosts(251)


def test_a_bucket_holds_a_segment_and_a_late_timer() -> None:
    assert link.Link(rate=2e8).bucket == ("tbf", "rate", "200000000bit", "burst", "73728", "latency", "5000us")
    assert link.Link(rate=1e10, delay=20).bucket == ("tbf", "rate", "10000000000bit", "burst", "1250000",
                                                     "latency", "40000us")
    assert link.Link(rate=None).bucket == () and link.Link(rate=None).delayed == ()
    assert link.Link(rate=None, delay=0.5).delayed[:3] == ("netem", "delay", "500us")


def queues(namespace: str, device: str) -> list[tuple[str, int]]:
    """Return the kind and the rate in bits a second of each queue that the kernel has for a device."""
    command = ["tc", "-n", namespace, "-json", "qdisc", "show", "dev", device]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [(queue["kind"], 8 * queue["options"].get("rate", 0)) for queue in json.loads(said)]


@real
def test_the_kernel_holds_each_link_to_the_rate_that_was_set_last(hosts: Hosts) -> None:
    for rate, queue in (("50mbit", ("tbf", 50e6)), ("400mbit", ("tbf", 400e6)), ("unlimited", ("noqueue", 0))):
        hosts.set_rate(rate)
        assert [queues(name, "eth0") for name in hosts.names] == [[queue]] * 2


@real
def test_what_a_link_reaches_is_measured_each_way(hosts: Hosts) -> None:
    found = link_rates.measure(hosts, "400mbit", seconds=0.1, tell=lambda text: None)
    assert found.rate == "400mbit" and found.asked == 400e6
    assert min(found.one_way, found.both_ways, found.idle, found.loaded) > 0


@real
def test_a_kernel_that_cannot_delay_says_so_and_leaves_nothing() -> None:
    before = names()
    try:
        with Hosts(2, delay="5ms") as hosts:
            hosts.set_rate("50mbit")
            assert {kind for kind, _ in queues(hosts._switch, "port0")} == {"netem", "tbf"}
    except HostsUnavailable as error:
        assert "netem" in str(error)
    assert names() == before


# Bytes and ranks


@real
def test_bytes_on_the_interface_are_those_sent_and_a_little_more(hosts: Hosts, script: Path) -> None:
    hosts.set_rate("unlimited")
    script.write_text(f"""
import os, socket, time
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(where) as server:
        connection = server.accept()[0]
        while connection.recv({MEBI}):
            pass
else:
    while True:
        try:
            with socket.create_connection(where) as connection:
                connection.sendall(bytes({4 * MEBI}))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)  # asking is traffic too
""")
    before = [hosts.bytes(host) for host in range(2)]
    hosts.launch([script], seconds=300)
    first, second = (hosts.bytes(host) - earlier for host, earlier in enumerate(before))
    assert 4 * MEBI <= second.sent < 1.1 * 4 * MEBI
    assert second.sent == first.received and first.sent == second.received < 0.1 * MEBI


@real
def test_ranks_have_the_variables_of_torchrun_and_answer_in_json(hosts: Hosts, script: Path) -> None:
    script.write_text("""
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "MORE")
print("{no JSON}, though it begins like it")
print(json.dumps([os.environ[name] for name in names]))
print(json.dumps({name: os.environ[name] for name in names}), json.dumps(sys.argv[1:]), sep="\\n")
""")
    found = hosts.launch([script, "word"], ranks_per_host=2, env={"MORE": "said"}, seconds=300)
    assert [line["RANK"] for lines in found for line in lines] == ["0", "1", "2", "3"]
    assert found[3] == [{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
                         "MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": "eth0", "MORE": "said"}]


@real
def test_gloo_reduces_over_the_link(hosts: Hosts, script: Path) -> None:
    script.write_text("""
import json, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.full((250_000,), 1.0 + dist.get_rank())
dist.all_reduce(value)
print(json.dumps({"sum": value.mean().item()}), flush=True)
dist.barrier()
dist.destroy_process_group()
""")
    before = hosts.bytes(0)
    assert hosts.launch([script], seconds=300) == [[{"sum": 3.0}], [{"sum": 3.0}]]
    assert 1e6 <= (hosts.bytes(0) - before).sent < 1.3e6


@real
def test_a_rank_that_dies_ends_the_others_and_all_are_heard(hosts: Hosts, script: Path) -> None:
    script.write_text("""
import os, sys, time
print("rank", os.environ["RANK"], "was here", flush=True)
if os.environ["RANK"] == "1":
    sys.exit("and could not go on")
time.sleep(600)
""")
    with pytest.raises(RankFailed, match=r"(?s)rank 1 ended with status 1\n.*on host 1:\n.*1 was here\n.*could not go on"):
        hosts.launch([script], seconds=300)
    assert not inside(hosts)


@real
def test_ranks_that_take_too_long_are_ended(hosts: Hosts, script: Path) -> None:
    script.write_text("import time; time.sleep(600)")
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] did not end within 0.1 s"):
        hosts.launch([script], seconds=0.1)
    with pytest.raises(subprocess.TimeoutExpired):
        hosts.run(0, ["sleep", "600"], seconds=0.1)
    assert not inside(hosts)


def inside(hosts: Hosts) -> str:
    return "".join(namespaces.tool("ip", "netns", "pids", name) for name in hosts.names)


@real
def test_a_command_that_fails_says_what_it_said(hosts: Hosts) -> None:
    assert hosts.run(1, ["echo", "yes"]).stdout == "yes\n"
    with pytest.raises(subprocess.CalledProcessError) as failed:
        hosts.run(1, ["sh", "-c", "echo no >&2; exit 3"])
    assert (failed.value.returncode, failed.value.stderr) == (3, "no\n")


# Whatever happens, nothing stays


@real
def test_an_exception_leaves_nothing() -> None:
    before = names()
    with pytest.raises(KeyError), Hosts(3, rate="1gbit") as hosts:
        assert len(names() - before) == 4
        sleeper = hosts.popen(2, ["sleep", "600"])
        raise KeyError
    assert names() == before
    assert sleeper.wait(120) == -signal.SIGKILL


HOLD = """
import signal, subprocess, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, by all children too
sys.path.insert(0, sys.argv[1])
from hosts import Hosts
with Hosts(2, rate="1gbit") as hosts:
    sleeper = hosts.popen(1, ["sh", "-c", "sleep 600 & wait"], stdout=subprocess.DEVNULL)
    print(sleeper.pid, flush=True)
    time.sleep(600)
"""


def held() -> tuple[subprocess.Popen[str], set[str]]:
    """Start a process that holds two hosts, with processes on one of them, and return it with its namespaces."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(BENCHMARKS)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout and int(holder.stdout.readline())
    mine = {name for name in names() if name.startswith(f"shoal-{holder.pid}-")}
    assert len(mine) == 3
    return holder, mine


@real
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_nothing(number: signal.Signals) -> None:
    holder, mine = held()
    holder.send_signal(number)
    holder.communicate(timeout=120)
    assert holder.returncode in (128 + number, -number)
    assert not names() & mine


@real
def test_namespaces_of_a_killed_run_are_swept_and_live_ones_are_spared() -> None:
    killed, left = held()
    alive, spared = held()
    killed.kill()
    killed.communicate(timeout=120)
    assert left <= names()
    with Hosts(1):
        assert not names() & left
        assert spared <= names()
    alive.terminate()
    alive.communicate(timeout=120)
    assert not names() & (left | spared)


def test_only_the_namespaces_of_the_dead_are_swept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = namespaces.name(0, "host0")
    dead = f"shoal-{os.getpid()}-1-0-host0"  # this number, but of a process that started long ago
    for name in (mine, dead, "shoal-host0", "other", "shoal-x-1-0-host0"):
        (tmp_path / name).touch()
    removed: list[str] = []
    monkeypatch.setattr(namespaces, "MOUNTS", tmp_path)
    monkeypatch.setattr(namespaces, "remove", removed.append)
    assert namespaces.sweep() == [dead] == removed


def test_a_process_that_waits_to_be_buried_counts_as_dead() -> None:
    child = subprocess.Popen(["true"])
    deadline = time.monotonic() + 120
    while namespaces.born(child.pid) and time.monotonic() < deadline:
        os.sched_yield()
    assert namespaces.born(child.pid) == "" and namespaces.born(os.getpid()) != ""
    child.wait()


# Where it cannot be


def test_a_machine_without_the_tools_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "PATH", "/nowhere")
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(HostsUnavailable, match="no `ip` on this machine; install iproute2"), Hosts(2):
        pass


def test_a_machine_that_is_no_linux_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "plan9")
    assert "and this is plan9" in unavailable()


@real
def test_a_user_who_may_not_is_told_what_is_needed() -> None:
    done = subprocess.run(["setpriv", "--bounding-set", "-net_admin", "--inh-caps", "-net_admin", sys.executable,
                           str(BENCHMARKS / "hosts.py"), "--", "true"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == ("hosts: not permitted: CAP_NET_ADMIN is needed; run as root, in a container with --privileged\n")


@real
def test_the_command_runs_on_each_host_and_fails_with_it() -> None:
    command = [sys.executable, str(BENCHMARKS / "hosts.py"), "--hosts", "3", "--"]
    done = subprocess.run([*command, "sh", "-c", "echo $RANK of $WORLD_SIZE"], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == ["0 of 3", "1 of 3", "2 of 3"]
    done = subprocess.run([*command, "sh", "-c", "exit $RANK"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "ended with status" in done.stderr
