"""`shoal run` with real processes: the environment of the ranks, exit codes and signals, and no orphans."""

import os
import pty
import re
import signal
import socket
import sys
import zipfile

import pytest

from shoal.launch import rank
from shoal.resilience.processes import process

ALL_REDUCE = """
import os, sys, torch, torch.distributed as dist
from shoal.transport.process_group import init_distributed
init_distributed()
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
cores = sorted(os.sched_getaffinity(0)) if "SHOAL_LAUNCH" in os.environ else "any"
message = (dist.get_rank(), dist.get_world_size(), total.item(), sys.argv[1:], os.environ.get("NAME"), cores)
sys.stdout.write(" ".join(map(str, message)) + "\\n")  # one write: unbuffered ranks share the terminal
"""

HOLDER = """
import json, torch, torch.distributed as dist, shoal
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
engine, *_ = shoal.initialize(model=torch.nn.Linear(4, 4), config=config)
json.groups = [dist.new_group([0, 1]) for _ in range(8)]  # keeps the groups referenced until the interpreter exits
for group in json.groups:
    dist.all_reduce(torch.ones(3), group=group)
"""
"""Ranks exit right after their last collectives while they still reference process groups."""

FAMILY = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import os, signal; os.write(1, b'child\\\\n'); signal.pause()"],
                         start_new_session=True)
os.write(1, f"rank {os.environ['RANK']} {os.getpid()}\\n".encode())  # one write: the ranks share the terminal
signal.pause()
"""
"""Each rank has a child process in another session."""

FINISH = """
import os, signal, sys
def finish(number, frame):
    os.write(1, f"finished {signal.Signals(number).name}\\n".encode())
    sys.exit(0)
signal.signal(signal.SIGINT, finish)
signal.signal(signal.SIGTERM, finish)
os.write(1, b"ready\\n")
while True: signal.pause()
"""

STUBBORN = """
import os, signal
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
os.write(1, b"ready\\n")
while True: signal.pause()
"""

ON_TERMINAL = """
import os, sys
os.open(sys.argv[1], os.O_RDWR)  # the first that the leader of a session opens is its terminal
os.execvp(sys.argv[2], sys.argv[2:])
"""


def rank_pids(lines):
    return {int(words[1]): int(words[2]) for words in map(str.split, lines) if words[0] == "rank"}


def test_two_ranks_get_their_cores_arguments_and_variables(start, script):
    launch = start(sys.executable, "-m", "shoal", "run", "--ranks", "2", "--env", "NAME=value",
                   script(ALL_REDUCE), "--", "--ranks", "a b", "--", "$HOME ${local_rank} $$")
    code, out, err = launch.end()
    lines = sorted(out.splitlines())
    assert code == 0, err
    groups = sorted(os.sched_getaffinity(0))
    shown = [line.split(" value ") for line in lines]
    given = ["--", "--ranks", "a b", "--", "$HOME ${local_rank} $$"]
    assert [first for first, _ in shown] == [f"{rank} 2 3.0 {given}" for rank in range(2)]
    bound = [set(eval(cores)) for _, cores in shown]
    if len(groups) > 1:
        assert not bound[0] & bound[1]
    launch.wait_until_gone()


def test_only_the_first_failing_rank_is_shown_with_its_traceback(run, script):
    launch = run("--ranks", "2", script("""
import os, signal
def inner():
    raise ValueError("no such herring")
if os.environ["RANK"] == "1":
    inner()
signal.pause()
"""))
    code, out, err = launch.end()
    assert (code, out) == (1, "")
    lines = err.splitlines()
    assert lines[0].startswith("---- rank 1 of 2 failed: ValueError: no such herring")
    assert f"host {os.uname().nodename}, rank 1, local rank 1, pid " in lines[1]
    assert lines[1].endswith("exit code 1")
    assert err.count("Traceback (most recent call last)") == 1
    assert err.count("in inner") == 1
    assert "shoal/launch/rank.py" not in err
    assert lines[-2] == "ValueError: no such herring"
    launch.wait_until_gone()


def test_an_error_is_shown_while_a_signal_handler_raises(run, script):
    code, _, err = run("--ranks", "1", script("""
import signal
def raise_late(*_):
    raise RuntimeError("a worker of the loader was killed")
class First(Exception):
    def __str__(self):
        signal.raise_signal(signal.SIGCHLD)  # while the launcher's code formats this error
        return "the first error"
signal.signal(signal.SIGCHLD, raise_late)
raise First
""")).end()
    assert code == 1
    assert "rank 0 of 1 failed: First: the first error" in err
    assert err.splitlines()[-2] == "First: the first error"


def test_a_rank_that_left_before_a_connection_was_lost_is_named(run, script):
    code, _, err = run("--ranks", "2", script("""
import os, torch, torch.distributed as dist
from shoal.transport.process_group import init_distributed
init_distributed()
if os.environ["RANK"] == "0":
    dist.all_reduce(torch.ones(1))
""")).end()
    assert code == 1
    assert "---- rank 0 of 2 failed: " in err
    assert "\nBefore, the program of rank 1 had ended without an error.\n" in err


def test_an_exception_without_a_message_is_reported_like_another(run, script):
    code, _, err = run("--ranks", "1", script("""
class Herring(Exception):
    def __str__(self):
        raise RuntimeError
raise Herring
""")).end()
    assert code == 1
    assert err.startswith("---- rank 0 of 1 failed: Herring: <exception str() failed> ---")
    assert err.count("Traceback (most recent call last)") == 1, "in the report alone"


def test_a_rank_leaves_no_file_of_which_python_would_warn(start, script):
    command = [sys.executable, "-m", "shoal", "run", "--ranks", "1", script("")]
    assert start(*command, PYTHONWARNINGS="always::ResourceWarning").end() == (0, "", "")


def test_the_exit_code_of_a_rank_becomes_the_exit_code_of_the_run(run, script):
    launch = run("--ranks", "1", script("import sys; sys.exit(7)"))
    code, _, err = launch.end()
    assert code == 7
    assert "rank 0 of 1 failed: sys.exit(7)" in err


FORK = """
import atexit, os, sys, torch, shoal
from shoal.recording.page import PAGES, read

def train(engine):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()

def begin():
    engine, *_ = shoal.initialize(model=torch.nn.Linear(4, 4), config={
        "train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}})
    train(engine)
    return engine

atexit.register(print, "handled")
engine = begin() if BEGUN else None
child = os.fork()
if child == 0:
    END
else:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    page = read(f"{os.environ[PAGES]}/rank{os.environ['LOCAL_RANK']}")
    train(engine or begin())
    print(code, page and page.phase.name)
"""


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("sys.exit(3)", 3), ("raise ValueError('x')", 1)])
def test_a_child_that_a_rank_forks_ends_without_harm_to_the_rank(run, script, end, code, begun):
    launch = run("--ranks", "2", script(FORK.replace("END", end).replace("BEGUN", str(begun))))
    ended, out, err = launch.end()
    told = f"{code} {'BETWEEN' if begun else None}"
    assert (ended, sorted(out.splitlines())) == (0, [told] * 2 + ["handled"] * 4), err
    assert err.count("ValueError: x\n") == (2 if "raise" in end else 0)


def test_an_exit_code_whose_8_bits_are_zero_is_success(run, script):
    launch = run("--ranks", "2", script("import os, sys; sys.exit(256 * (os.environ['RANK'] == '0'))"))
    assert launch.end() == (0, "", "")


def test_a_program_without_an_interpreter_line_says_so(run, tmp_path):
    (tmp_path / "program").write_text("echo herring")
    (tmp_path / "program").chmod(0o755)
    code, _, err = run("--ranks", "1", "--no-python", str(tmp_path / "program")).end()
    assert code == 126
    assert f"{str(tmp_path / 'program')!r} cannot be executed: Exec format error; a script begins with #!, such as" in err


def test_ranks_that_keep_groups_until_exit_succeed(run, script):
    path = script(HOLDER)
    assert [run("--ranks", "2", path).end()[0] for _ in range(3)] == [0] * 3


def test_a_killed_rank_ends_the_run_and_leaves_no_process(run, script):
    launch = run("--ranks", "2", script(FAMILY))
    ranks = rank_pids(launch.read(4))
    os.kill(ranks[1], signal.SIGKILL)
    code, _, err = launch.end()
    assert code == 128 + signal.SIGKILL
    assert "rank 1 of 2 failed: killed by SIGKILL" in err
    launch.wait_until_gone()


def test_a_child_with_an_environment_of_its_own_does_not_outlive_the_run(run, script):
    launch = run("--ranks", "1", script("""
import subprocess
child = subprocess.Popen(["sleep", "10000"], env={}, start_new_session=True)
print(child.pid)
"""))
    code, out, err = launch.end()
    assert code == 0, err
    left = process(int(out))
    assert left is None or left.state == "Z"


def test_a_launch_whose_standard_streams_are_closed_runs(start, script, tmp_path):
    target = script("import sys; print('I am'); open(sys.argv[1], 'w').write('here')")
    code, _, _ = start("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "shoal", "run", "--ranks", "1",
                       target, str(tmp_path / "end")).end()
    assert code == 0
    assert (tmp_path / "end").read_text() == "here"


def test_a_killed_launcher_leaves_no_process(start, script):
    launch = start(sys.executable, "-m", "shoal", "run", "--ranks", "2", script(FAMILY))
    launch.read(4)
    os.kill(launch.pid, signal.SIGKILL)
    launch.wait_until_gone()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_ranks_and_they_have_time_to_finish(run, script, number):
    launch = run("--ranks", "2", script(FINISH))
    launch.read(2)
    os.kill(launch.pid, number)
    code, out, err = launch.end()
    assert code == 128 + number
    assert out.splitlines() == [f"finished {number.name}"] * 2
    assert f"sending {number.name} to 2 ranks; 30 s are left to finish" in err
    launch.wait_until_gone()


@pytest.mark.parametrize(("before", "number"), [((), signal.SIGHUP), (("nohup",), signal.SIGTERM)], ids=["plain", "nohup"])
def test_a_terminal_that_goes_away_ends_a_run_unless_nohup_started_it(start, script, before, number):
    screen, terminal = pty.openpty()
    launch = start(sys.executable, "-c", ON_TERMINAL, os.ttyname(terminal), *before, sys.executable, "-m", "shoal", "run",
                   "--ranks", "1", script(FINISH))
    assert launch.read(1) == ["ready"]
    os.close(screen)
    if before:
        os.kill(launch.pid, signal.SIGTERM)
    code, _, err = launch.end()
    os.close(terminal)
    assert code == 128 + number, err
    launch.wait_until_gone()


def test_ranks_that_ignore_signals_are_killed_after_the_grace_period(run, script):
    launch = run("--ranks", "1", "--grace", "0.2", script(STUBBORN))
    launch.read(1)
    os.kill(launch.pid, signal.SIGTERM)
    assert launch.end()[0] == 128 + signal.SIGTERM
    launch.wait_until_gone()


def test_a_second_signal_kills_at_once(run, script):
    launch = run("--ranks", "1", "--grace", "1000", script(STUBBORN))
    launch.read(1)
    os.kill(launch.pid, signal.SIGTERM)
    assert launch.err.readline().startswith("shoal run: sending SIGTERM to 1 rank")
    os.kill(launch.pid, signal.SIGINT)
    assert launch.end()[0] == 128 + signal.SIGINT
    launch.wait_until_gone()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_torch_is_imported_is_not_lost(start, script, number):
    launch = start(sys.executable, "-c", f"""
import os, sys
from shoal.launch.cli import main
class Numpy:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy.linalg":  # torch imports it, and clears the exceptions of that
            sys.meta_path.remove(self)
            os.kill(os.getpid(), {int(number)})
sys.meta_path.insert(0, Numpy())
sys.exit(main(["run", "--ranks", "1", sys.argv[1]]))
""", script("print('begun')"))
    code, out, err = launch.end()
    assert (code, out) == (128 + number, ""), err
    launch.wait_until_gone()


def test_ranks_restart_after_a_failure_with_a_new_rendezvous(run, script):
    launch = run("--ranks", "2", "--max-restarts", "1", script("""
import os, torch, torch.distributed as dist
from shoal.transport.process_group import init_distributed
init_distributed()
total = torch.ones(())
dist.all_reduce(total)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    os.kill(os.getpid(), 9)
dist.all_reduce(total)
print(total.item())
"""))
    code, out, err = launch.end()
    assert (code, out.splitlines()) == (0, ["4.0", "4.0"]), err
    assert "rank 1 of 2 failed: killed by SIGKILL" in err
    assert "restarting all ranks: attempt 2 of 2" in err
    launch.wait_until_gone()


def test_log_dir_writes_a_file_per_rank_beside_the_live_output(run, script, tmp_path):
    launch = run("--ranks", "2", "--log-dir", str(tmp_path / "logs"), script("import os; print('I am', os.environ['RANK'])"))
    code, out, err = launch.end()
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[rank 0] I am 0", "[rank 1] I am 1"]
    assert [(tmp_path / "logs" / f"rank{rank}.out").read_text() for rank in range(2)] == ["I am 0\n", "I am 1\n"]


def test_a_second_job_leaves_the_logs_of_the_first_as_they_are(run, script, tmp_path):
    where = ("--ranks", "1", "--log-dir", str(tmp_path / "logs"))
    first = run(*where, script(f"""
import os, time
print("first", flush=True)
while not os.path.exists({str(tmp_path / "end")!r}):
    time.sleep(0.05)
print("its end")
"""))
    first.read(1)
    (tmp_path / "second.py").write_text("print('second')")
    code, out, err = run(*where, str(tmp_path / "second.py")).end()
    (tmp_path / "end").touch()
    assert (code, out) == (0, "[rank 0] second\n")
    told = "rank0.out cannot be written: another job writes it; give each job its own --log-dir"
    assert err.count(told) == 1
    assert first.end()[0] == 0
    assert (tmp_path / "logs" / "rank0.out").read_text() == "first\nits end\n"


@pytest.mark.parametrize("where", [("--ranks", "1"), ("--hosts", "localhost:0")], ids=["here", "hosts"])
def test_a_job_goes_on_where_its_output_or_its_logs_cannot_be_written(run, script, tmp_path, where):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.err").symlink_to("/dev/full")
    launch = run(*where, "--log-dir", str(tmp_path / "logs"), script("""
import sys
print("begun", flush=True)
sys.stdin.readline()
print("lost" * 10, file=sys.stderr)
for line in range(10000):  # more than pipes hold
    print("line", line, "." * 60)
"""))
    assert launch.read(1)[0].endswith("begun")
    launch.out.close()
    code, err = launch.wait(), launch.err.read()
    assert code == 0, err
    assert err.count("the standard output cannot be written: Broken pipe") == 1
    assert err.count("rank0.err cannot be written: No space left on device") == 1
    assert "lost" * 10 in err
    assert len((tmp_path / "logs" / "rank0.out").read_text().splitlines()) == 10001


PRINTS = """
import sys
for number in range(LINES):
    print("line", number, "." * 90)
with open(sys.argv[1], "w") as end:
    end.write("here")
"""


@pytest.mark.parametrize("where", [("--ranks", "1"), ("--hosts", "localhost:0")], ids=["here", "hosts"])
def test_a_reader_that_pauses_holds_up_no_rank_and_learns_what_it_missed(run, script, tmp_path, where):
    os.mkfifo(tmp_path / "end")
    launch = run(*where, "--log-dir", str(tmp_path / "logs"), script(PRINTS.replace("LINES", "40000")),
                 str(tmp_path / "end"))
    assert (tmp_path / "end").read_text() == "here"  # though nobody has read a line
    code, out, err = launch.end()
    assert code == 0, err
    at, missing = 0, 0
    for line in out.splitlines():
        if found := re.search(r"rank 0\] .*: ([\d,]+) lines \([\d.]+ .iB\) are left out here, .*; all of them are ", line):
            missing += (count := int(found[1].replace(",", "")))
            at += count
        else:
            assert f"rank 0] line {at} " in line
            at += 1
    assert at == 40000
    assert missing > 0
    assert len((tmp_path / "logs" / "rank0.out").read_text().splitlines()) == 40000


def test_a_signal_ends_a_launch_whose_output_nobody_reads(run, script, tmp_path):
    os.mkfifo(tmp_path / "end")
    launch = run("--ranks", "1", "--log-dir", str(tmp_path), script(PRINTS.replace("LINES", "4000")), str(tmp_path / "end"))
    assert (tmp_path / "end").read_text() == "here"
    os.kill(launch.pid, signal.SIGTERM)
    assert launch.wait() == 128 + signal.SIGTERM
    assert "Fatal" not in launch.err.read()


def test_a_core_or_a_port_that_cannot_be_had_is_refused(run, script, free_port):
    code, _, err = run("--ranks", "1", "--core-list", "0,65000", script("")).end()
    assert code == 2
    assert re.search(r"^shoal run: --core-list: \S+ has no core 65000 for this job; choose from \d", err, re.MULTILINE), err
    with socket.create_server(("127.0.0.1", free_port)):
        code, _, err = run("--ranks", "1", "--port", str(free_port), script("")).end()
    assert code == 2
    assert re.search(rf"^shoal run: --port: port {free_port} of \S+ cannot be opened: .*; choose ", err, re.MULTILINE), err


def test_a_folder_for_logs_that_cannot_be_made_is_refused(run, script):
    code, _, err = run("--ranks", "1", "--log-dir", __file__, script("")).end()
    assert code == 2
    assert f"shoal run: --log-dir {__file__}: the folder cannot be made: {__file__} is a file; give another" in err


def test_a_module_runs_as_main_with_the_working_folder_on_its_path(run, tmp_path):
    (tmp_path / "herring.py").write_text("import sys; print(__name__, sys.argv[1:])")
    launch = run("--ranks", "1", "--module", "herring", "--flag", folder=str(tmp_path))
    assert launch.end()[:2] == (0, "__main__ ['--flag']\n")


def test_any_program_runs_without_python(run):
    launch = run("--ranks", "1", "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE; exit 3")
    code, out, err = launch.end()
    assert (code, out) == (3, "0 of 1\n")
    assert "rank 0 of 1 failed: exit code 3" in err


def test_two_nodes_meet_at_a_rendezvous(run, script, free_port):
    command = ("--ranks", "1", "--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port}", "--no-bind-cores")
    path = script(ALL_REDUCE)
    nodes = [run(*command, "--node-rank", str(node), path) for node in range(2)]
    ends = [node.end() for node in nodes]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert sorted(out.split()[0] for _, out, _ in ends) == ["0", "1"]
    assert all(out.split()[1:3] == ["2", "3.0"] for _, out, _ in ends)


def test_a_process_without_launcher_is_a_job_of_one(start, script):
    code, out, err = start(sys.executable, script(ALL_REDUCE)).end()
    assert (code, out) == (0, "0 1 1.0 [] None any\n"), err


def test_torchrun_starts_the_same_script(start, script):
    code, out, err = start(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                           script(ALL_REDUCE)).end()
    assert (code, sorted(out.splitlines())) == (0, [f"{rank} 2 3.0 [] None any" for rank in range(2)]), err


def test_mpirun_starts_the_same_script(start, script, mpirun):
    code, out, err = start(*mpirun, "-n", "2", sys.executable, script(ALL_REDUCE)).end()
    assert (code, sorted(out.splitlines())) == (0, [f"{rank} 2 3.0 [] None any" for rank in range(2)]), err


def test_others_stop_before_the_exit_handlers_of_a_rank_that_raised(run, script, tmp_path):
    launch = run("--ranks", "2", script(f"""
import atexit, os, time
rank = int(os.environ["RANK"])
folder = {str(tmp_path)!r}
with open(f"{{folder}}/{{rank}}.part", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{{folder}}/{{rank}}.part", f"{{folder}}/{{rank}}.pid")
if rank == 1:
    time.sleep(1000)

def finish():
    while os.path.exists(f"/proc/{{pid}}/exe"):
        time.sleep(0.01)
    left.write("rank 1 has ended")

while not os.path.exists(f"{{folder}}/1.pid"):
    time.sleep(0.01)
pid = int(open(f"{{folder}}/1.pid").read())
left = open(f"{{folder}}/left", "w")
atexit.register(finish)
raise ValueError("the cause")
"""))
    code, _, err = launch.end()
    assert code == 1
    assert "rank 0 of 2 failed: ValueError: the cause" in err
    assert "then rank 1" not in err
    assert (tmp_path / "left").read_text() == "rank 1 has ended"


@pytest.mark.parametrize(("name", "seconds", "left"), [
    ("prefetch", 1000, ["handled"]), ("writer", 1, ["wrote", "handled"]),
    ("shoal-save-1", rank.THREADS_END + 2, ["wrote", "handled"])])
@pytest.mark.parametrize("end", ["raise ValueError('the cause')", "sys.exit(3)"])
def test_a_rank_that_failed_waits_for_its_threads_a_short_time(run, script, end, name, seconds, left):
    launch = run("--ranks", "1", "--grace", "60", script(f"""
import atexit, sys, threading, time

def write():
    time.sleep({seconds})
    print("wrote", flush=True)

atexit.register(print, "handled", flush=True)
threading.Thread(target=write, name={name!r}).start()
{end}
"""))
    code, out, err = launch.end()
    assert (code, out.splitlines()) == (3 if "exit" in end else 1, left), err
    assert err.count("its threads still run: prefetch. End them") == (1 if left == ["handled"] else 0)
    assert "TimeoutError" not in err


def test_a_rank_that_ends_writes_what_its_handlers_objects_and_files_hold(run, script, tmp_path):
    code, out, err = run("--ranks", "1", script(f"""
import atexit, zipfile
import torch

class Last:
    def __del__(self):
        print("deleted", flush=True)

atexit.register(print, "handled")
last = Last()
left = open({str(tmp_path / "left")!r}, "w")
left.write("buffered")
archive = zipfile.ZipFile({str(tmp_path / "left.zip")!r}, "w")
archive.writestr("name", "text")
""")).end()
    assert (code, out.splitlines()) == (0, ["handled", "deleted"]), err
    assert (tmp_path / "left").read_text() == "buffered"
    assert zipfile.ZipFile(tmp_path / "left.zip").read("name") == b"text"


def test_a_module_that_ends_as_a_rank_flushes_its_files(run, tmp_path):
    (tmp_path / "leaver.py").write_text(f"open_file = open({str(tmp_path / 'left')!r}, 'w')\nopen_file.write('buffered')")
    code, _, err = run("--ranks", "1", "--module", "leaver", folder=str(tmp_path)).end()
    assert (code, err) == (0, "")
    assert (tmp_path / "left").read_text() == "buffered"


LAST_SAVE = """
import os, sys, torch, shoal

engine, *_ = shoal.initialize(model=torch.nn.Linear(2, 1), config={"train_micro_batch_size_per_gpu": 1})
engine.save_checkpoint(sys.argv[1] + "/below")
if sys.argv[2] == "exit":
    sys.exit(3)
"""


@pytest.mark.parametrize(("way", "expected"), [("end", 1), ("exit", 3)])
def test_a_last_save_that_fails_is_the_error_of_a_rank(run, script, tmp_path, way, expected):
    (tmp_path / "file").write_text("")
    code, _, err = run("--ranks", "2", script(LAST_SAVE), str(tmp_path / "file"), way).end()
    assert code == expected
    failure = "CheckpointError: could not save " if way == "end" else "sys.exit(3)"
    assert f"of 2 failed: {failure}" in err
    assert "Traceback" not in err
