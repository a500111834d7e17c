"""Hosts find out that a link between them is lost, and the launcher chooses with which of them the job goes on."""

from __future__ import annotations

import itertools
import queue
import signal
import socket
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.hostfile import Host
from shoal.launch import cluster, links, reachability
from shoal.launch.cluster import Cluster, Node
from shoal.launch.console import Terminal
from shoal.launch.links import HostLinks, partners
from shoal.launch.protocol import Begin, Channel, Listening, Serve, Signal, Unreached
from shoal.launch.reachability import LostLinks, most_that_reach

DIAL = 0.2


def pairs(*lost: tuple[int, int]) -> set[frozenset[int]]:
    return {frozenset(each) for each in lost}


def test_links_end_where_another_host_wakes_their_thread_first(monkeypatch: pytest.MonkeyPatch) -> None:
    wake = HostLinks._wake

    def late(self: HostLinks) -> None:
        with socket.create_connection(("127.0.0.1", self.port)):
            self._thread.join()
        wake(self)

    with HostLinks(6.0, lambda message: None):
        monkeypatch.setattr(HostLinks, "_wake", late)


# The choice


@pytest.mark.parametrize(("count", "lost", "kept"), [
    (3, [], [0, 1, 2]),
    (2, [(0, 1)], [0]),
    (3, [(1, 2)], [0, 1]),
    (3, [(0, 1), (0, 2)], [1, 2]),
    (4, [(0, 2), (0, 3), (1, 2), (1, 3)], [0, 1]),
    (5, [(0, 3), (0, 4), (1, 3), (1, 4), (2, 3), (2, 4)], [0, 1, 2]),
    (5, [(0, 1), (0, 2), (1, 2), (3, 4)], [0, 3]),
    (4, [(0, 1), (1, 2), (2, 3)], [0, 2]),
], ids=["none", "2 hosts", "one link", "first host", "halves", "larger side", "triangle and pair", "chain"])  # fmt: skip
def test_the_most_hosts_stay_that_reach_each_other(count, lost, kept):
    assert most_that_reach(range(count), pairs(*lost)) == kept


@given(st.integers(1, 8).flatmap(lambda count: st.tuples(
    st.just(count), st.sets(st.sampled_from(list(itertools.combinations(range(max(count, 2)), 2)))))))
def test_no_other_hosts_are_more_or_stand_before_them(drawn):
    count, lost = drawn[0], pairs(*drawn[1])
    sets = [each for size in range(count + 1) for each in itertools.combinations(range(count), size)
            if not any(frozenset(two) in lost for two in itertools.combinations(each, 2))]
    most = max(map(len, sets))
    assert most_that_reach(range(count), lost) == list(next(each for each in sets if len(each) == most))


def test_the_choice_among_many_hosts_is_quick():
    halves = pairs(*itertools.product(range(150), range(150, 300)))
    assert most_that_reach(range(300), halves) == list(range(150))
    couples = pairs(*((2 * each, 2 * each + 1) for each in range(150)))
    assert most_that_reach(range(300), couples) == list(range(0, 300, 2))


# Reports


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock of the launcher that the test sets."""
    now = [100.0]
    for module in (cluster, reachability):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    return now


def test_hosts_are_left_out_once_all_reports_have_come(clock):
    lost = LostLinks()
    lost.report(0, [1])
    assert lost.leave_out([0, 1, 2], ()) == {}
    clock[0] += 1.0
    lost.report(0, [1, 2])
    assert lost.leave_out([0, 1, 2], ()) == {}, "a report has just come"
    clock[0] += 1.0
    assert lost.leave_out([0, 1, 2], ()) == {}
    clock[0] += 1.0
    assert lost.leave_out([0, 1, 2], ()) == {0: [1, 2]}
    assert lost.leave_out([1, 2], ()) == {}


def test_a_host_that_is_reached_again_stays(clock):
    lost = LostLinks()
    lost.report(0, [1])
    assert lost.leave_out([0, 1], ()) == {}
    lost.report(0, [])
    clock[0] += 10.0
    assert lost.leave_out([0, 1], ()) == {}


def test_a_host_that_the_launcher_does_not_hear_is_left_to_it(clock):
    lost = LostLinks()
    lost.report(0, [1])
    lost.leave_out([0, 1], ())
    clock[0] += 10.0
    assert lost.leave_out([0, 1], [1]) == {}
    assert lost.leave_out([0, 1], [0]) == {}
    assert lost.leave_out([0, 1], []) == {1: [0]}


class Started:
    """A cluster of hosts that have started, and what each was sent."""

    def __init__(self, count: int, least: int, now: float) -> None:
        self.closed: list[int] = []
        self.told: list[Any] = []
        self.nodes = [Node(Host(name=f"h{number}", slots=(0,)), channel=cast(Channel, SimpleNamespace(
            send=self.told.append, close=lambda number=number: self.closed.append(number))), last_heard=now)
            for number in range(count)]
        self.job = SimpleNamespace(least=least)
        self.sent: list[tuple[Any, list[str]]] = []

    def send(self, message: Any, nodes: list[Node] | None = None) -> None:
        """Note a message, and to whom it went."""
        self.sent.append((message, [each.name for each in (self.nodes if nodes is None else nodes)]))


def monitor(started: Started) -> tuple[Any, list[str]]:
    """Return the monitor of a job whose first attempt has begun, and the lines that it shows."""
    lines: list[str] = []
    made = cluster._JobMonitor(cast(Cluster, started), cast(Terminal, SimpleNamespace(
        status=lines.append, leave_report=lambda text: None)), 5.0)
    made.begin_attempt()
    made.take(started.nodes[0], Listening(port=1, addresses=["a"]))
    return made, lines


def lose_link(job: Any, reporter: Node, lost: int, clock: list[float]) -> None:
    """Have a host report another as unreached, and the job's monitor decide once no other report has come."""
    job.take(reporter, Unreached(hosts=[lost]))
    job.heed()
    clock[0] += reachability.SETTLE
    job.heed()


def test_the_next_attempt_begins_without_the_host_of_a_lost_link(clock):
    started = Started(3, 2, clock[0])
    job, lines = monitor(started)
    lose_link(job, started.nodes[1], 2, clock)
    job.take(started.nodes[0], Listening(port=2, addresses=["a"]))
    assert started.sent[2:] == [(Serve(), ["h0"]), (Begin(attempt=2, hosts=[0, 1], port=2, addresses=["a"]), ["h0", "h1"])]
    assert set(started.closed) == {2}
    assert started.told == [Signal(number=signal.SIGTERM)]  # so that it does not take this for the end of the launcher
    assert lines == ["shoal run: h2 is lost: host h1 cannot reach host h2, though this machine reaches them; see to the "
                     "network between them; it ran rank 2; the job goes on with 2 hosts"]


def test_a_job_that_needs_all_hosts_ends_at_a_lost_link(clock):
    started = Started(2, 2, clock[0])
    job, lines = monitor(started)
    lose_link(job, started.nodes[0], 1, clock)
    assert job.finish() == 1
    assert started.closed == [1]
    assert lines == ["shoal run: h1 is lost: host h0 cannot reach host h1, though this machine reaches them; see to the "
                     "network between them; it ran rank 1"]


# Connections


@pytest.mark.parametrize("places", [1, 2, 3, 4, 9, 2 * links.MOST + 1])
def test_hosts_dial_so_that_each_pair_has_a_connection(places):
    dialed = {frozenset((place, other)) for place in range(places) for other in partners(place, places)}
    assert len(dialed) == places * (places - 1) // 2


def test_a_host_of_very_many_dials_a_bounded_number():
    assert [len(partners(place, 5000)) for place in (0, 2500, 4999)] == [links.MOST] * 3


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[Unreached]:
    """What a host tells the launcher, with quick attempts to connect."""
    monkeypatch.setattr(links, "DIAL", DIAL)
    return queue.SimpleQueue()


def accept(server: socket.socket) -> None:
    """Take a connection, and end it."""
    server.accept()[0].close()


def test_a_host_that_is_reached_no_more_is_told_and_so_is_its_return(told):
    with HostLinks(6.0, told.put) as own:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            own.watch({5: ("127.0.0.1", port)})
            accept(other)
            accept(other)  # it is there again, and not told
        assert told.get(timeout=60) == Unreached(hosts=[5])
        with socket.create_server(("127.0.0.1", port)):
            assert told.get(timeout=60) == Unreached(hosts=[])
            own.watch({})
        own.watch({5: ("127.0.0.1", port)})  # of another attempt
        assert told.get(timeout=60) == Unreached(hosts=[5])


def test_a_host_that_was_never_reached_is_not_told(told):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with HostLinks(6.0, told.put) as own, HostLinks(6.0, told.put) as third:
        own.watch({5: ("127.0.0.1", port), 7: ("127.0.0.1", third.port)})
        time.sleep(5 * DIAL)
        assert told.empty()


def test_a_stopped_agent_is_still_reached(told):
    with socket.create_server(("127.0.0.1", 0)) as stopped, HostLinks(6.0, told.put) as own:  # only its kernel accepts
        own.watch({5: stopped.getsockname()})
        time.sleep(5 * DIAL)
        assert told.empty()


def test_kernels_probe_connections_within_the_time_of_a_silent_host(told):
    with socket.create_server(("127.0.0.1", 0)) as other, HostLinks(20.0, told.put) as own:
        own.watch({5: other.getsockname()})
        with other.accept()[0]:
            (connection,) = [each.connection for each in own._partners.values()]
            assert connection is not None
            assert [connection.getsockopt(socket.IPPROTO_TCP, option) for option in (
                socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)] == [1, 1, 16]


@pytest.mark.parametrize(("quiet", "interval", "probes"), [(3.0, 1, 1), (131.0, 1, 127), (132.0, 2, 64), (1e9, 32767, 127)])
def test_probes_stay_within_the_limits_of_linux(quiet, interval, probes, told):
    with socket.create_server(("127.0.0.1", 0)) as other, HostLinks(quiet, told.put) as own:
        own.watch({5: other.getsockname()})
        with other.accept()[0]:
            (connection,) = [each.connection for each in own._partners.values()]
            assert connection is not None
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == interval
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == probes


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_hosts_reach_each_other_by_ipv6(told):
    with HostLinks(6.0, told.put) as own, HostLinks(6.0, told.put) as other:
        own.watch({5: ("::1", other.port), 7: ("127.0.0.1", other.port)})
        deadline = time.monotonic() + 60
        while not all(each.is_connected for each in own._partners.values()) or len(own._partners) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
