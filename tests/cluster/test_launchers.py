"""Real hosts: `shoal run` over ssh, pdsh, Open MPI, MPICH and Slurm on three machines of network namespaces."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCHERS = ["ssh", "pdsh", "openmpi", "mpich", "slurm"]
SHOAL = [sys.executable, "-m", "shoal"]
SECONDS = 300.0
SOON = 90.0
"""Less than hosts have to start: an error is not waited for."""
TOKEN = "SHOAL_TEST_TOKEN"

ALL_REDUCE = """
import os, sys, torch, torch.distributed as dist, shoal
shoal.init_distributed()
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
names = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "CUDA_VISIBLE_DEVICES")
print(os.uname().nodename, dist.get_rank(), dist.get_world_size(), total.item(), [os.environ[name] for name in names],
      sys.argv[1:])
print("complaint", file=sys.stderr)
"""
VARIABLES = """
import json, os, sys
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump({name.hex(): value.hex() for name, value in os.environb.items()}, file)
print(os.uname().nodename)
"""
FAILS = """
import os, signal
def inner():
    raise ValueError("no such herring")
if os.environ["RANK"] == "1":
    inner()
signal.pause()
"""
GOES_ON = """
import time, torch, torch.distributed as dist, shoal
shoal.init_distributed()
ranks = dist.get_world_size()
print(dist.get_rank(), "of", ranks, flush=True)
for _ in range(1000 if ranks == 3 else 5):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
"""
WAITS = """
import os, signal, subprocess, sys
def finish(number, frame):
    os.write(1, f"finished {signal.Signals(number).name}\\n".encode())
    sys.exit(0)
signal.signal(signal.SIGINT, finish)
subprocess.Popen([sys.executable, "-c", "import os, signal; os.write(1, b'child\\\\n'); signal.pause()"],
                 start_new_session=True)
os.write(1, b"ready\\n")
while True: signal.pause()
"""
"""Each rank has a child in another session."""


@pytest.fixture
def script(tmp_path):
    def write(text):
        (tmp_path / "script.py").write_text(text)
        return str(tmp_path / "script.py")

    return write


def words(machines, launcher, *more):
    return [*SHOAL, "run", "--hostfile", str(machines.folder / "hosts.txt"), "--launcher", launcher, *more]


def variables(machines, token="none"):
    return {TOKEN: token, "SLURM_CONF": str(machines.folder / "slurm" / "slurm.conf")}


def run(machines, launcher, *more, env=None):
    return machines.execute(0, words(machines, launcher, *more), env={**variables(machines), **(env or {})}, seconds=SECONDS)


def left_over(token):
    """Return the processes on any machine, and outside, that carry the token of a launch."""
    found, word = [], f"{TOKEN}={token}".encode()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                with open(f"{entry.path}/environ", "rb") as environ, open(f"{entry.path}/cmdline", "rb") as line:
                    if word in environ.read().split(b"\0"):
                        found.append(line.read().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found


def wait_until_gone(token):
    deadline = time.monotonic() + SECONDS
    while (left := left_over(token)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


class Started:
    """A launch of WAITS whose three ranks and their children run."""

    def __init__(self, machines, launcher, script, *more):
        self.token = f"{launcher}-{random.getrandbits(64):x}"
        self.process = machines.popen(0, words(machines, launcher, *more, "--export", TOKEN, script(WAITS)),
                                      env=variables(machines, self.token), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                      text=True)
        self.lines = [self.process.stdout.readline() for _ in range(6)]

    def launcher_pid(self):
        """Return the process of the launch itself, which the one that entered the machine has started."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def test_ranks_of_three_hosts_train_together_in_the_order_of_the_file(machines, script, tmp_path):
    done = run(machines, "ssh", "--log-dir", str(tmp_path / "logs"), script(ALL_REDUCE), "a b", "'$HOME")
    assert done.returncode == 0, done.stderr
    facts = [["0", "1", str(node), "3", "0"] for node in range(3)]
    texts = [f"node{node} {node} 3 6.0 {facts[node]} {['a b', chr(39) + '$HOME']}" for node in range(3)]
    assert sorted(done.stdout.splitlines()) == [f"[node{node} rank {node}] {texts[node]}" for node in range(3)]
    assert [(tmp_path / f"logs/rank{rank}.out").read_text() for rank in range(3)] == [f"{text}\n" for text in texts]
    assert all("complaint\n" in (tmp_path / f"logs/rank{rank}.err").read_text() for rank in range(3))


def random_variables():
    """Return 500 variables of random bytes, with quotes, newlines, dollars, and what no encoding knows."""
    draw = random.Random(26)
    alphabet = b" '\"\\\n\r\t$`!*?[]{}()<>|&;#~%^=:,.-+/\x01\x7f\x80\xff\xc3\xa9" + b"azAZ09"
    values = [bytes(draw.choice(alphabet) if draw.random() < 0.7 else draw.randrange(1, 256)
                    for _ in range(draw.randrange(80))) for _ in range(500)]
    return {f"HERRING_{number}".encode(): value for number, value in enumerate(values)}


@pytest.mark.parametrize("launcher", LAUNCHERS, indirect=True)
def test_500_random_variables_arrive_byte_for_byte(machines, launcher, script, tmp_path):
    given = random_variables()
    env = {os.fsdecode(name): os.fsdecode(value) for name, value in given.items()}
    done = run(machines, launcher, "--export", "HERRING_*", script(VARIABLES), str(tmp_path), env=env)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[node{node} rank {node}] node{node}" for node in range(3)]
    for rank in range(3):
        found = {bytes.fromhex(name): bytes.fromhex(value)
                 for name, value in json.loads((tmp_path / f"{rank}.json").read_text()).items()}
        assert {name: found.get(name) for name in given} == given


def test_the_first_failing_rank_is_shown_once_and_gives_the_exit_code(machines, script):
    done = run(machines, "ssh", script(FAILS))
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("----"):].splitlines()
    assert report[0].startswith("---- rank 1 of 3 failed: ValueError: no such herring")
    assert report[1].startswith("host node1, rank 1, local rank 0, pid ") and report[1].endswith("exit code 1")
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    assert report[-2] == "ValueError: no such herring"


def test_ctrl_c_reaches_the_ranks_of_all_hosts_and_leaves_nothing(machines, script):
    launch = Started(machines, "ssh", script)
    os.kill(launch.launcher_pid(), signal.SIGINT)
    out, err = launch.process.communicate(timeout=SECONDS)
    assert launch.process.returncode == 128 + signal.SIGINT, err
    assert sorted(out.splitlines()) == [f"[node{node} rank {node}] finished SIGINT" for node in range(3)]
    wait_until_gone(launch.token)


@pytest.mark.parametrize("launcher", LAUNCHERS, indirect=True)
def test_a_killed_launcher_leaves_no_process_and_no_file_of_the_job(machines, launcher, script):
    before = set(Path.cwd().glob(".shoal-job-*"))
    launch = Started(machines, launcher, script, "--grace", "1")
    os.kill(launch.launcher_pid(), signal.SIGKILL)
    launch.process.communicate(timeout=SECONDS)
    wait_until_gone(launch.token)
    assert set(Path.cwd().glob(".shoal-job-*")) == before


def test_a_host_whose_link_is_down_is_lost_and_the_others_end(machines, script):
    launch = Started(machines, "ssh", script, "--grace", "1", "--lost-after", "10")
    try:
        machines.execute(2, ["ip", "link", "set", "eth0", "down"])
        _, err = launch.process.communicate(timeout=SECONDS)
        wait_until_gone(launch.token)
    finally:
        machines.execute(2, ["ip", "link", "set", "eth0", "up"])
    assert launch.process.returncode == 1
    assert "shoal run: node2 is lost: no message from it for 10 s; it is down, stopped, or cut off; it ran rank 2" in err


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"], indirect=True)
def test_a_job_goes_on_without_its_first_host_whose_link_is_down(machines, launcher, script):
    job = machines.popen(0, [*SHOAL, "run", "--hosts", "node1:0@node2:0@node0:0", "--launcher", launcher, "--nodes", "2:3",
                             "--max-restarts", "3", "--grace", "1", script(GOES_ON)], env=variables(machines),
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert sorted(job.stdout.readline() for _ in range(3)) == [
            "[node0 rank 2] 2 of 3\n", "[node1 rank 0] 0 of 3\n", "[node2 rank 1] 1 of 3\n"]
        machines.execute(1, ["ip", "link", "set", "eth0", "down"])
        out, err = job.communicate(timeout=SECONDS)
    finally:
        machines.execute(1, ["ip", "link", "set", "eth0", "up"])
        job.kill()
    assert job.returncode == 0, err
    assert sorted(out.splitlines()) == ["[node0 rank 1] 1 of 2", "[node2 rank 0] 0 of 2"], err
    assert "shoal run: node1 is lost: no message from it for 6 s; it is down, stopped, or cut off; it ran rank 0" in err
    assert "rank 1 of 3 failed: " in err
    assert "ended because node1 is lost" in err


def test_nodes_started_by_hand_need_no_names(machines, script, tmp_path):
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    command = [*SHOAL, "run", "--nodes", "3", "--ranks", "1", "--rendezvous", f"{machines.hosts.address(0)}:29400"]
    bare = ["unshare", "--mount", "sh", "-c", f'mount --bind {tmp_path / "hosts"} /etc/hosts && exec "$@"', "sh"]
    nodes = [machines.popen(node, [*bare, *command, script(GOES_ON.replace("1000 if ranks == 3 else 5", "5"))],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for node in range(3)]
    ends = [node.communicate(timeout=SECONDS) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0, 0], ends
    assert sorted(out for out, _ in ends) == [f"{rank} of 3\n" for rank in range(3)]


def test_the_published_command_line_starts_all_hosts(machines, script, tmp_path):
    command = [sys.executable, "-m", "shoal.compat.deepspeed.launcher.runner", "-H", str(machines.folder / "hosts.txt"),
               "--launcher", "pdsh", "--include", "node1@node2", script("""
import deepspeed, os, sys
print(os.environ["RANK"], os.environ["LOCAL_SIZE"], sys.argv[1:], repr(os.environ["NCCL_X"]))
""")]
    done = machines.execute(0, command, env={"NCCL_X": "a 'b\n$c"}, seconds=SECONDS)
    if "there is no `pdsh`" in done.stderr:
        pytest.skip("needs pdsh; apt-get install pdsh")
    assert done.returncode == 0, done.stderr
    value = repr("a 'b\n$c")
    assert sorted(done.stdout.splitlines()) == [
        f"[node{rank + 1} rank {rank}] {rank} 1 ['--local_rank=0'] {value}" for rank in range(2)]


# What cannot be


@pytest.mark.parametrize(("host", "message"), [
    ("node9", "node9: no such host; correct the name, or add it to ~/.ssh/config"),
    ("10.77.0.200", "10.77.0.200: it does not answer; is it up, and is the network?"),
])  # fmt: skip
def test_a_host_that_cannot_be_reached_is_named_in_one_line(machines, script, host, message):
    done = machines.execute(0, [*SHOAL, "run", "--hosts", f"node1:0@{host}:0", script(FAILS)], seconds=SECONDS)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("shoal run: ")]
    assert line.startswith(f"shoal run: {message}")


@pytest.mark.parametrize(("options", "message"), [
    ("-p 2222", "node1: it refuses the connection; start sshd there, or give the port with --ssh-port"),
    ("-i /dev/null -o IdentitiesOnly=yes -F /dev/null -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null",
     "node1: it refuses the login; put your public key there (ssh-copy-id HOST)"),
    ("-o UserKnownHostsFile=/dev/null -o GlobalKnownHostsFile=/dev/null -o StrictHostKeyChecking=yes",
     "node1: its key is not the one that ssh knows"),
])  # fmt: skip
def test_a_host_that_refuses_is_named_with_the_remedy(machines, script, options, message):
    command = [*SHOAL, "run", "--hosts", "node1:0", f"--launcher-args={options}", script(FAILS)]
    done = machines.execute(0, command, seconds=SECONDS)
    assert done.returncode == 2
    assert f"shoal run: {message}" in done.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS, indirect=True)
@pytest.mark.parametrize("lacking", [1, 2])
def test_a_host_without_this_python_is_named_alone(machines, launcher, script, lacking):
    """Each launcher tells of it in its own words, and srun goes on with the other hosts."""
    machines.execute(lacking, ["sh", "-c", f"mkdir -p /run/empty && mount --bind /run/empty {Path(sys.prefix).resolve()}"])
    try:
        done = machines.execute(0, words(machines, launcher, script(FAILS)), env=variables(machines), seconds=SOON)
    finally:
        machines.execute(lacking, ["umount", Path(sys.prefix).resolve()])
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"shoal run: node{lacking}: it has no such Python; install the same ")
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_folder_that_a_host_lacks_is_named(machines, script, tmp_path):
    where = machines.execute(0, ["sh", "-c", f"mkdir /run/own && cd /run/own && {' '.join(SHOAL)} run --hosts node1:0 "
                                             f"{script(FAILS)}"], seconds=SECONDS)
    assert where.returncode == 2
    assert "node1: no folder /run/own: No such file or directory; start in a folder that every host has" in where.stderr


def test_check_cluster_shows_every_host(machines):
    done = machines.execute(0, [*SHOAL, "check-cluster", "--hostfile", str(machines.folder / "hosts.txt")], seconds=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"node{number} " in done.stdout for number in range(3))
    assert done.stdout.count(" ms ") == 3 and done.stdout.count("/s ") == 3
    assert done.stdout.endswith("3 hosts can run a job\n")


def test_check_cluster_names_a_host_without_shared_memory(machines):
    machines.execute(1, ["sh", "-c", "head -c 250M /dev/zero > /dev/shm/full"])
    try:
        done = machines.execute(0, [*SHOAL, "check-cluster", "--hosts", "node0:0@node1:0"], seconds=SECONDS)
    finally:
        machines.execute(1, ["rm", "/dev/shm/full"])
    assert done.returncode == 1
    assert re.search(r"node1: /dev/shm has [56][.\d]* MiB free, and needs 64 MiB; free it, or mount it larger", done.stdout)
