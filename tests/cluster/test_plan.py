"""Hostfiles, filters, the commands of launchers, and what is refused, without any host."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shoal.cluster import hostfile
from shoal.cluster.hostfile import Host
from shoal.cluster.launchers import LAUNCHERS, Start, find, refuse_nested
from shoal.errors import HostsError, LaunchError
from shoal.launch import check_cluster, facts, meeting
from shoal.launch.addresses import own_addresses
from shoal.launch.cli import main
from shoal.launch.cluster import Cluster, Node, run_job
from shoal.launch.console import Terminal
from shoal.launch.facts import Facts
from shoal.launch.job import ClusterJob
from shoal.launch.launch_plan import LaunchPlan
from shoal.launch.links import HostLinks
from shoal.launch.meeting import ClusterRendezvous
from shoal.launch.protocol import Begin, Exited, Hello, HostProblem
from shoal.launch.selection import Selection
from shoal.launch.start_errors import explain
from shoal.launch.starting import Closed, Ended, ErrorLine, HostEvent, Starter
from shoal.launch.streams import RankStreams

PLAN = LaunchPlan(kind="script", target="x.py", args=(), ranks=1, nodes=(1, 1), rendezvous=None, hosts_rendezvous=None,
                  job="j", max_restarts=0, log_dir=None, bind_cores=False, grace=0.0)
HOSTS = [Host(name="a", slots=(0, 1)), Host(name="b", slots=(0, 1, 2))]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["run", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("text", "message"), [
    ("a slots=2\n\na slots=1\n", "line 3: Hostfile contains multiple entries for a; write one line with all its slots"),
    ("node0 slots=2\nNode0 slots=1\n", "line 2: Hostfile contains multiple entries for Node0 (as node0: names of hosts do "
     "not differ by case)"),
    ("a slots=0\n", "line 1: a has slots=0; give it at least one, or remove the line"),
    ("a\n", "line 1: Hostfile contains a bad entry: a; write `NAME slots=N`"),
    ("fe80::1 slots=2\n", "line 1: fe80::1 is no name of a host; it has letters, digits, _ . - and +"),
    ("a[0-1] slots=2\n", "line 1: a[0-1] is no name of a host"),
    ("a slots=100000\n", "line 1: a has 100000 slots; choose at most 4096"),
    ("a slots=99999999999\n", "line 1: a has slots=999999999...; choose at most 4096"),
    (f"a slots={'9' * 5000}\n", "line 1: a has slots=999999999...; choose at most 4096"),
    ("-oProxyCommand=x slots=2\n", "line 1: -oProxyCommand=x is no name of a host"),
    ("# none\n", "Hostfile is empty; write lines of `NAME slots=N`"),
])  # fmt: skip
def test_a_wrong_hostfile_is_refused_with_file_and_line(
        capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hosts").write_text(text)
    assert message in refused(capsys, "--hostfile", str(tmp_path / "hosts"), "train.py")


@pytest.mark.parametrize(("words", "message"), [
    ("--hostfile none.txt x.py", "none.txt: cannot be read as a hostfile: No such file or directory; write lines of"),
    ("--hosts a:0 --include a --exclude a x.py", "--include and --exclude are mutually exclusive; drop one"),
    ("--hosts a:0 --include a --nodes 1 x.py", "--include or --exclude with --nodes or --ranks: both select"),
    ("--hosts a:0 --include c x.py", "--include: Hostname 'c' not found in hostfile; choose from a"),
    ("--hosts a:0 --exclude a:1 x.py", "--exclude: No slot '1' specified on host 'a', which has 0"),
    ("--hosts a:0 --exclude a x.py", "--exclude: no slot is left to run on; exclude fewer"),
    ("--hosts a x.py", "--hosts: a names no slot; write a:0,1 for two ranks"),
    ("--hosts a:0,1,0 x.py", "--hosts: a names slot 0 twice; a slot is the place of one rank"),
    ("--hosts a:0 --include a:b x.py", "--include: got 'a:b': invalid literal in a filter; write NAME"),
    ("--hosts a:0 --include @ x.py", "--include: got '@', which names no host; write NAME"),
    ("--hosts a:0 --launcher-args ' x.py", "--launcher-args: got \"'\": No closing quotation; quote its words"),
    ("--hosts a:0 --ssh-port 70000 x.py", "--ssh-port: got 70000; choose 1 to 65535"),
    ("--hosts a:0 --lost-after nan x.py", "--lost-after: got nan; choose 3 seconds or more"),
    ("--core-list 3-1 x.py", "--core-list: got '3-1', which is no core; write the smaller number of a range first"),
    ("--hosts a:x x.py", "--hosts: got 'a:x': invalid literal in a filter; write NAME[:SLOT[,SLOT...]] joined by @"),
    ("--hosts a:0 --nodes 2 x.py", "--nodes: got 2; choose at most 1, for the hosts are a"),
    ("--hosts a:0 --nodes 1:2 x.py", "--nodes 1:2: to go on with fewer hosts is a restart, and none is allowed; give "),
    ("--hosts a:0@b:0 --nodes 1:2 --max-restarts 1 --launcher mpich x.py", "--nodes 1:2 --launcher mpich: it ends all hosts "
     "where one is lost; use ssh or pdsh"),
    ("--hosts a:0 --ranks 2 x.py", "--ranks: got 2; choose at most 1, the slots of a, or leave that host out"),
    ("--hosts a:0 --hostfile f x.py", "--hostfile and --hosts: both name the hosts; drop one"),
    ("--hosts a:0@b:0,1 --launcher openmpi x.py", "--launcher openmpi needs equally many slots on every host, got a 1, b 2"),
    ("--hosts a:0 --launcher mpich --ssh-port 1 x.py", "--ssh-port: --launcher mpich does not take it"),
    ("--hosts a:0 --node-rank 0 x.py", "--node-rank: the order of the hosts gives each its number; drop it"),
    ("--hosts a:0 --port 1 x.py", "--port: it is that of a single node"),
    ("--hosts a:0 --lost-after 1 x.py", "--lost-after: got 1; choose 3 seconds or more"),
    ("--hosts a:0 --export NO_SUCH x.py", "--export NO_SUCH: it is not set here; set it, or give --env NO_SUCH=VALUE"),
    ("--launcher pdsh x.py", "--launcher pdsh: give --hostfile FILE or --hosts LIST"),
    ("--launcher slurm x.py", "--launcher slurm without a hostfile: give --ranks N, the ranks on each node"),
    ("--include a x.py", "--include: it is for hosts that are started from here; give --hostfile FILE"),
    ("--core-list 1-x x.py", "--core-list: got '1-x'; write numbers below 100000 and ranges, such as 0-7,16"),
    ("--core-list 0-999999999 x.py", "--core-list: got '0-999999999'; write numbers below 100000"),
])  # fmt: skip
def test_options_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    assert f"shoal run: {message}" in refused(capsys, *words.split())


@pytest.mark.parametrize(("words", "message"), [
    ("--hosts a:0 --nodes -1", "--nodes: got -1; choose 1 or more"),
    ("--hosts a:0 --ranks 0", "--ranks: got 0; choose 1 or more"),
    ("--hosts a:0 --seconds nan", "--seconds: got nan; choose more than 0, up to 10"),
])  # fmt: skip
def test_an_examination_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    assert main(["check-cluster", *words.split()]) == 2
    assert f"shoal check-cluster: {message}" in capsys.readouterr().err


def test_the_mark_of_an_encoding_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfa slots=1\n")
    assert hostfile.read(tmp_path / "hosts") == [Host(name="a", slots=(0,))]


def test_the_percent_signs_of_a_path_are_not_placeholders_of_pdsh() -> None:
    start = Start(hosts=("a",), command=("python", "/my %h/job"))
    assert LAUNCHERS["pdsh"].render("pdsh", start)[0][-1] == "exec python '/my %%h/job' %n"


def test_lines_that_end_in_cr_lf_are_read_and_named(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"a slots=1\r\nb slots=2\r\n")
    assert main(["run", "--hostfile", str(tmp_path / "hosts"), "--dry-run", __file__]) == 0
    shown = capfd.readouterr()
    assert "2 hosts, 3 ranks, started by ssh" in shown.out
    assert "its lines end in CR LF; read as LF. Convert it with sed -i" in shown.err


def test_a_dry_run_shows_hosts_variables_and_commands_without_values(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_X", "hidden")
    program(tmp_path, monkeypatch, "pdsh", "")
    assert main(["run", "--hosts", "a:0,1@b:3", "--launcher", "pdsh", "--dry-run", "--env", "Y=z", __file__, "a b"]) == 0
    shown = capsys.readouterr().out
    assert "3 ranks, started by pdsh" in shown and "slots 3            rank 2" in shown
    assert "NCCL_X" in shown and "hidden" not in shown and "$ pdsh -S -f 1024 -R ssh -w a,b 'exec " in shown
    assert f"each rank runs: python {__file__} 'a b'" in shown


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    """Put a program first on the path that prints `said`."""
    (folder / name).write_text(f"#!/bin/sh\necho '{said}'\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_dry_run_refuses_what_a_run_would(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert main(["run", "--hosts", "a:0", "--setup", "/no/such", "--dry-run", "nosuch.py"]) == 2
    shown = capsys.readouterr()
    assert "1 host, 1 rank, started by ssh" in shown.out, "the plan is shown all the same"
    first, second = shown.err.splitlines()
    assert first.startswith("shoal run: no script 'nosuch.py' in ")
    assert second == "--setup /no/such: it cannot be read here; give a script that every host has"
    program(tmp_path, monkeypatch, "mpiexec.hydra", "HYDRA build details")
    monkeypatch.setenv("PMI_RANK", "3")
    assert main(["run", "--hosts", "a:0", "--launcher", "mpich", "--dry-run", __file__]) == 2
    assert "--launcher mpich, first host a: PMI_RANK=3 is set, so this process is itself" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["run", "--hosts", "a:0", "--launcher", "pdsh", "--dry-run", __file__]) == 2
    assert "--launcher pdsh: there is no `pdsh` of it on this machine; apt-get" in capsys.readouterr().err


def examined_cluster(found: dict[str, dict[str, object]], folder: str) -> Cluster:
    """Return the cluster of an examination: hosts with these facts beside those of here; one without any does not start."""
    job = ClusterJob(secret="", hosts=tuple(Host(name=name, slots=(0,)) for name in found), environment={}, folder=folder,
                     plan=None, least=len(found), quiet=60.0)
    starter = Starter(LAUNCHERS["ssh"], [], {}, None)
    starter.start = lambda job: None  # type: ignore[method-assign]
    for number, (name, facts_there) in enumerate(found.items()):
        if facts_there:
            hello = Hello(node=number, host=name, pid=1, facts={**asdict(facts.gather(folder)), **facts_there})
            starter.events.put(HostEvent(node=number, message=hello))
        else:
            starter.events.put(HostEvent(node=number, message=ErrorLine(text=f"ssh: Could not resolve hostname {name}")))
            starter.events.put(HostEvent(node=number, message=Closed()))
    return Cluster(starter, job, LAUNCHERS["ssh"])


def test_an_examination_shows_hosts_beside_one_that_is_bad(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = examined_cluster({"a": {"torch": "1.0"}, "b": {}, "c": {"disk": 0}}, str(tmp_path))

    @contextmanager
    def give(selection: Selection, plan: object) -> Generator[Cluster]:
        yield made

    def examine(cluster: Cluster, node: Node, other: Node, seconds: float) -> check_cluster._Examined:
        assert "b" not in (node.name, other.name)
        return check_cluster._Examined(offset=0.0, rate=0.0 if node.name == "c" else 1e9)

    monkeypatch.setattr(Selection, "cluster", give)
    monkeypatch.setattr(check_cluster, "_examine", examine)
    assert main(["check-cluster", "--hosts", "a:0@b:0@c:0"]) == 1
    shown = capsys.readouterr().out
    lines = shown[shown.index("└"):].splitlines()[1:]
    here = facts.gather(str(tmp_path)).torch
    assert lines == [
        "b: no such host; correct the name, or add it to ~/.ssh/config (ssh: Could not resolve hostname b)",
        f"a: torch is 1.0, and {here} here; install torch {here} there, in {sys.executable}",
        "c: the disk of the working folder has 0 B free; make room for checkpoints",
        "c: a cannot be reached from it; let the hosts connect to each other", "4 faults"]
    rows = {row.split()[1]: row for row in shown.splitlines() if row.startswith("│")}
    assert list(rows) == ["a", "b", "c"] and " 1.0 " in rows["a"] and "GiB" not in rows["b"]


def test_a_run_warns_of_what_its_hosts_lack(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cluster = examined_cluster({"a": {"shared_memory": 0, "clock": 0.0}}, str(tmp_path))
    cluster.job = replace(cluster.job, plan=PLAN)
    with cluster:
        pass
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("shoal run: a: the clock is -") and "set it by NTP" in first
    assert second.startswith("shoal run: a: /dev/shm has 0 B free, and needs 64 MiB; free it, or mount it larger")


def test_filters_and_counts_keep_the_order_of_the_hosts() -> None:
    assert hostfile.included(HOSTS, "b:2,0@a") == [Host(name="a", slots=(0, 1)), Host(name="b", slots=(0, 2))]
    for alone in ("b@b:1", "b:1@b", "b:1@b@b:2"):
        assert hostfile.included(HOSTS, alone) == [Host(name="b", slots=(0, 1, 2))], "a name alone is all its slots"
    assert hostfile.excluded(HOSTS, "a@b:1") == [Host(name="b", slots=(0, 2))]
    assert hostfile.first(HOSTS, 1, 1) == HOSTS[:1]
    assert hostfile.first(HOSTS, 1, 9) == HOSTS
    assert hostfile.limited(HOSTS, 1) == [Host(name="a", slots=(0,)), Host(name="b", slots=(0,))]


@pytest.mark.parametrize(("name", "commands"), [
    ("ssh", [["p", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=5", "-o",
              "ServerAliveCountMax=4", "-p", "7", "-v", "a", "exec python 'my boot' 0"], ["python", "my boot", "1"]]),
    ("pdsh", [["p", "-S", "-f", "1024", "-R", "ssh", "-w", "a,here", "-v", "exec python 'my boot' %n"]]),
    ("openmpi", [["p", "--allow-run-as-root", "-n", "2", "--host", "a:1,here:1", "--map-by", "ppr:1:node", "--bind-to",
                  "none", "-v", "python", "my boot", "OMPI_COMM_WORLD_RANK"]]),
    ("mpich", [["p", "-n", "2", "-ppn", "1", "-hosts", "a,here", "-launcher", "ssh", "-bind-to", "none", "-v", "python",
                "my boot", "PMI_RANK"]]),
    ("slurm", [["p", "--nodes", "2", "--ntasks", "2", "--ntasks-per-node", "1", "--nodelist", "a,here", "--input", "none",
                "--unbuffered", "--cpu-bind", "none", "--mpi", "none", "-v", "python", "my boot", "SLURM_PROCID"]]),
])  # fmt: skip
def test_a_launcher_renders_the_same_start_to_its_own_command(name: str, commands: list[list[str]]) -> None:
    start = Start(hosts=("a", "here"), command=("python", "my boot"), args=("-v",), ssh_port=7, local=frozenset({"here"}),
                  root=True)
    assert LAUNCHERS[name].render("p", start) == commands


def test_a_setup_script_is_sourced_before_the_command(tmp_path: Path) -> None:
    (tmp_path / "set up").write_text("X='from setup'\nexport X\n")
    start = Start(hosts=("a",), command=("sh", "-c", 'echo "$X $0"'), setup=str(tmp_path / "set up"))
    assert subprocess.run(start.words("5"), capture_output=True, text=True, check=True).stdout == "from setup 5\n"
    for text in (None, "false\n"):
        (tmp_path / "set up").unlink() if text is None else (tmp_path / "set up").write_text(text)
        done = subprocess.run(start.words("5"), capture_output=True, text=True, check=False)
        assert done.returncode == 3
        said = f"--setup {tmp_path / 'set up'}: it cannot be read there, or ends with an error; give a script"
        assert explain(done.stderr.splitlines()).startswith(said)


def test_the_program_of_another_product_is_not_taken() -> None:
    found = {"mpirun": "/bin/mpirun"}
    assert find(LAUNCHERS["openmpi"], found.get, lambda path: "mpirun (Open MPI) 4.1") == "/bin/mpirun"
    with pytest.raises(LaunchError, match=r"no `mpirun` of it on this machine; /bin/mpirun is another product's; apt-get"):
        find(LAUNCHERS["openmpi"], found.get, lambda path: "HYDRA build details")
    with pytest.raises(LaunchError, match="--launcher pdsh: there is no `pdsh` of it on this machine; apt-get install pdsh"):
        find(LAUNCHERS["pdsh"], found.get, lambda path: "")


def test_variables_of_another_job_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"first host a: PMI_RANK=3 is set, so this process is itself a rank of such"):
        refuse_nested(LAUNCHERS["mpich"], {"PMI_RANK": "3"}, ["a"])
    with pytest.raises(LaunchError, match="first host a: PDSH_RCMD_TYPE=rsh is set, and Shoal starts hosts by ssh; unset"):
        refuse_nested(LAUNCHERS["pdsh"], {"PDSH_RCMD_TYPE": "rsh"}, ["a"])
    refuse_nested(LAUNCHERS["ssh"], {"PMI_RANK": "3", "PDSH_RCMD_TYPE": "rsh"}, ["a"])


def test_what_hosts_say_before_all_have_started_is_heard(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = ClusterJob(secret="s", hosts=tuple(Host(name=name, slots=(0,)) for name in "ab"), environment={},
                     folder=str(tmp_path), plan=PLAN, least=2, quiet=20.0)
    starter = Starter(LAUNCHERS["ssh"], [], {}, None)
    for node, name in enumerate("ab"):
        hello = Hello(node=node, host=name, pid=1, facts=asdict(facts.gather(str(tmp_path))))
        for message in (hello, HostProblem(text=f"no herring on {name}"), Exited(code=1)):
            starter.events.put(HostEvent(node=node, message=message))
    with Terminal(None) as terminal:
        assert run_job(Cluster(starter, job, LAUNCHERS["ssh"], terminal.status), terminal, 0.0) == 2
    assert capfd.readouterr().err.splitlines() == ["shoal run: a: no herring on a", "shoal run: b: no herring on b"]


def test_a_host_of_which_the_launcher_complains_is_not_awaited(tmp_path: Path) -> None:
    job = ClusterJob(secret="s", hosts=tuple(Host(name=name, slots=(0,)) for name in ("b", "bb")), environment={},
                     folder=str(tmp_path), plan=PLAN, least=2, quiet=20.0)
    starter = Starter(LAUNCHERS["mpich"], [], {}, None)
    hello = Hello(node=0, host="b", pid=1, facts=asdict(facts.gather(str(tmp_path))))
    for node, message in ((None, ErrorLine(text="bb: Warning: a herring")), (None, ErrorLine(
            text="ssh: Could not resolve hostname bb: Name or service not known")), (0, hello)):
        starter.events.put(HostEvent(node=node, message=message))
    with pytest.raises(LaunchError, match=r"^bb: no such host; correct the name.*\(ssh: Could not .*\)$"), Cluster(
            starter, job, LAUNCHERS["mpich"]):
        pass


def starting_cluster(launcher: str, names: list[str], folder: Path, lines: list[str], *, started: dict[int, str],
                     ends: bool) -> Cluster:
    """Return the cluster of a job whose launcher says these lines; then the `started` hosts introduce themselves."""
    job = ClusterJob(secret="s", hosts=tuple(Host(name=name, slots=(0,)) for name in names), environment={},
                     folder=str(folder), plan=PLAN, least=len(names), quiet=20.0)
    starter = Starter(LAUNCHERS[launcher], [], {}, None)
    events: list[HostEvent] = [HostEvent(node=None, message=ErrorLine(text=line)) for line in lines]
    events += [HostEvent(node=node, message=Hello(node=node, host=name, pid=1, facts=asdict(facts.gather(str(folder)))))
               for node, name in started.items()]
    for event in events + [HostEvent(node=None, message=Ended())] * ends:
        starter.events.put(event)
    return Cluster(starter, job, LAUNCHERS[launcher])


OPEN_MPI = ["-" * 74, "mpirun.openmpi was unable to launch the specified application as it could not access",
            "or execute an executable:", "Executable: /x/python", "Node: node1", "while attempting to start process rank 1.",
            "-" * 74]
NO_PYTHON = "it has no such Python; install the same environment at the same path there"
EXPIRED = ["srun: error: Unable to confirm allocation for job 99: Invalid job id specified",
           "srun: Check SLURM_JOB_ID environment variable. Expired or invalid job 99"]
STEPD = "slurmstepd-node1: error: execve(): /x/python: No such file or directory"


@pytest.mark.parametrize(("launcher", "names", "lines", "started", "message"), [
    ("openmpi", ["node0", "node1", "node10"], OPEN_MPI, {}, f"node1: {NO_PYTHON} ({' '.join(OPEN_MPI[1:-1])})"),
    ("openmpi", ["node0", "node1"], ["[node0:01083] plm:rsh: Warning: setpgid(1089,1089) failed", *OPEN_MPI], {},
     f"node1: {NO_PYTHON} ({' '.join(OPEN_MPI[1:-1])})"),
    ("openmpi", ["node0", "node1.net"], OPEN_MPI[:-1], {}, f"node1.net: {NO_PYTHON} ({' '.join(OPEN_MPI[1:-1])})"),
    ("slurm", ["node0", "node1"], [STEPD], {}, f"node1: {NO_PYTHON} ({STEPD})"),
    ("slurm", ["", ""], [STEPD], {}, f"node1: {NO_PYTHON} ({STEPD})"),
    ("slurm", ["", ""], [STEPD], {1: "node0"}, f"node1: {NO_PYTHON} ({STEPD})"),
    ("slurm", ["node0", "node1"], [STEPD], {0: "node0"}, f"node1: {NO_PYTHON} ({STEPD})"),
    ("slurm", ["a", "b"], EXPIRED, {}, "a and b: SLURM_JOB_ID names a job that is over; unset SLURM_JOB_ID, or start within "
     f"a job that runs ({EXPIRED[1]})"),
    ("mpich", ["a", "b", "c", "d"], [], {}, "a, b and 2 more: mpich ended before it started"),
])  # fmt: skip
def test_what_a_launcher_says_names_the_host_at_fault_alone(
        tmp_path: Path, launcher: str, names: list[str], lines: list[str], started: dict[int, str], message: str) -> None:
    """Where other hosts have started, the launcher goes on."""
    with pytest.raises(LaunchError) as refused, starting_cluster(launcher, names, tmp_path, lines, started=started,
                                                                 ends=not started):
        pass
    assert str(refused.value) == message


@contextmanager
def meeting_host(folder: Path, node: int, endpoint: str | None) -> Generator[tuple[ClusterRendezvous, list[str]]]:
    """Give the rendezvous of a host of a job on a and b, and what it tells the user."""
    job = ClusterJob(secret="s", hosts=(Host(name="a", slots=(0,)), Host(name="b", slots=(0,))), environment={},
                     folder=str(folder), plan=None, least=1, quiet=20.0)
    told: list[str] = []
    with HostLinks(20.0, lambda message: None) as links:
        yield ClusterRendezvous(job, node, endpoint, links, tell=told.append), told


def test_the_address_of_the_store_is_that_of_the_first_host_alone(tmp_path: Path) -> None:
    with meeting_host(tmp_path, 0, "10.9.8.7:0") as (first, _), meeting_host(tmp_path, 1, "10.9.8.7:0") as (second, _):
        assert first.serve().addresses == ["10.9.8.7"]
        assert second.serve().addresses == own_addresses(), "the first host is lost"


def test_a_rendezvous_without_an_address_is_refused(tmp_path: Path) -> None:
    with meeting_host(tmp_path, 0, "nope.invalid:0") as (host, _), pytest.raises(
            LaunchError, match=f"^--rendezvous: the name nope.invalid has no address on {socket.gethostname()}; correct"):
        host.serve()


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEET", 0.5)
    monkeypatch.setattr(meeting, "WORD", 0.0)


@pytest.mark.usefixtures("short_wait")
def test_a_host_that_does_not_reach_the_store_says_so_and_gives_up(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A LaunchError is a RuntimeError, which means a lost store: it was taken for one, and the job hung."""
    def connect(addresses: list[str], port: int, seconds: float) -> None:
        time.sleep(meeting.LOOK)

    monkeypatch.setattr(meeting, "connect", connect)
    said = "cannot reach a at 1.2.3.4, port 7; let hosts connect to each other, or give --rendezvous HOST:PORT"
    with meeting_host(tmp_path, 1, None) as (host, told):
        host.begin(Begin(attempt=1, hosts=[0, 1], port=7, addresses=["1.2.3.4"]))
        with pytest.raises(LaunchError, match=f"^{said}"):
            host.next_rendezvous()
    assert told[0].startswith("waiting, for at most ")
    assert said in told[0]
    assert len(told) < 10, "it tells rarely"


@pytest.mark.usefixtures("short_wait")
def test_hosts_that_do_not_come_to_the_store_are_named(tmp_path: Path) -> None:
    with meeting_host(tmp_path, 0, None) as (host, told):
        port = host.serve().port
        host.begin(Begin(attempt=3, hosts=[0, 1], port=port, addresses=["127.0.0.1"]))
        with pytest.raises(LaunchError, match=f"^b did not come to a at 127.0.0.1, port {port}, to run attempt 3$"):
            host.next_rendezvous()
    assert told[0].endswith(f"s more: b did not come to a at 127.0.0.1, port {port}, to run attempt 3")


@pytest.mark.usefixtures("short_wait")
def test_what_listens_at_the_address_and_is_no_store_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_store(*words: object, **more: object) -> None:
        raise RuntimeError("failed handshake")

    monkeypatch.setattr(meeting, "TCPStore", no_store)
    with meeting_host(tmp_path, 1, None) as (host, _), socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        host.begin(Begin(attempt=1, hosts=[0, 1], port=port, addresses=["127.0.0.1"]))
        with pytest.raises(LaunchError, match=f"^a at 127.0.0.1, port {port}: the store is lost: failed handshake; is"):
            host.next_rendezvous()


def test_a_job_is_the_same_after_its_travel() -> None:
    plan = LaunchPlan(kind="script", target="x.py", args=("a b", "\udcff"), ranks=None, nodes=(2, 2), rendezvous=None,
                      hosts_rendezvous=None, job="j", max_restarts=1, log_dir=None, bind_cores=True, grace=1.0,
                      core_list=(1,))
    job = ClusterJob(secret="s", hosts=tuple(HOSTS), environment={"A": "\udcff\n'"}, folder="/", plan=plan, least=1,
                     quiet=3.0)
    assert ClusterJob.decode(job.encode()) == job
    assert job.ranks == 5


def test_a_host_of_another_version_is_named_with_the_remedy() -> None:
    here = Facts(python="3.11.7", torch="2.13.0", shoal="1", cores=1, memory=1, shared_memory=0, disk=0, clock=0.0)
    there = Facts(python="3.12.1", torch="2.12.0", shoal="1", cores=1, memory=1, shared_memory=0, disk=0, clock=0.0)
    python, torch = facts.disagreements("a", there, here)
    assert python.startswith("a: Python is 3.12, and 3.11 here; install Python 3.11 there, in ")
    assert torch.startswith("a: torch is 2.12.0, and 2.13.0 here; install torch 2.13.0 there, in ")
    clock, shared, disk = facts.faults("a", there, offset=-2.5)
    assert clock.startswith("a: the clock is -2.5 s off; set it by NTP")
    assert shared.startswith("a: /dev/shm has 0 B free, and needs 64 MiB; ")
    assert disk.startswith("a: the disk of the working folder")


@pytest.mark.parametrize(("line", "meaning"), [
    ("ssh: connect to host a port 22: Connection refused", "it refuses the connection; start sshd there"),
    ("ssh: connect to host a port 22: No route to host", "it does not answer"),
    ("root@a: Permission denied (publickey).", "it refuses the login; put your public key there"),
    ("Host key verification failed.", "its key is not the one that ssh knows"),
    ("sh: 1: exec: /x/python: not found", "it has no such Python"),
    ("/x/python: No module named shoal", "this Python has no Shoal there"),
    ("shoal: a: no folder /x: No such file or directory", "no folder /x: No such file or directory"),
    ("something else", "something else"),
])  # fmt: skip
def test_what_ssh_says_is_explained(line: str, meaning: str) -> None:
    assert explain(["Warning: noise", line]).startswith(meaning)
    assert meaning in explain([f"node1: {line}", "pdsh@here: node1: ssh exited with exit code 3"])


def test_lines_of_ranks_keep_their_bytes_and_their_order(tmp_path: Path) -> None:
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    streams = RankStreams(str(tmp_path), lambda line: lines.put(os.fsencode(line.text)))
    with open(streams.open(3, 0, "out"), "wb", buffering=0) as pipe:
        for part in (b"a\xff", b"b\nprogress 1\rprogress 2\r\nla", b"st"):
            pipe.write(part)
    assert [lines.get() for _ in range(4)] == [b"a\xffb", b"progress 1", b"progress 2", b"last"]
    with open(streams.open(3, 1, "out"), "wb", buffering=0) as pipe:  # the next attempt: no other pipe is open
        pipe.write(b"again\r")
        assert lines.get() == b"again"
        pipe.write(b"\nend")
    streams.close()
    assert lines.get() == b"end" and lines.empty()


def test_a_name_that_is_no_filter_is_an_error_of_hosts() -> None:
    with pytest.raises(HostsError, match="write NAME"):
        hostfile.parse_filter(":1")
