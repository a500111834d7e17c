"""`shoal doctor` on live jobs, dead ones and none, and a job that survives a killed rank by its copies in memory."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launched import SECONDS

from shoal.errors import UsageError
from shoal.launch import doctor
from shoal.launch.cli import main
from shoal.launch.failure import REPORT
from shoal.launch.job_record import JobRecord, write_record

WAIT = """
import os, time, torch, shoal
engine, *_ = shoal.initialize(model=torch.nn.Linear(4, 4), config={"train_micro_batch_size_per_gpu": 1,
                                                                   "optimizer": {"type": "AdamW"}})
for step in range(3):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
def say_ready(*_):
    os.write(1, f"ready {engine.global_rank} {os.getpid()}\\n".encode())
if engine.global_rank == 0:
    engine.module.weight.register_hook(say_ready)  # said within backward, where this rank waits for rank 1
    engine.backward(engine(torch.ones(1, 4)).sum())
say_ready()
def lurk():
    time.sleep(1000)
lurk()
"""

SURVIVE = """
import os, signal, sys, torch, shoal
torch.manual_seed(0)
data = torch.randn(400, 8, generator=torch.Generator().manual_seed(1))
config = {"train_batch_size": 4, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2},
          "resilience": {"vault": {"every": 5}}}
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
engine, _, loader, _ = shoal.initialize(model=model, training_data=data, config=config)
engine.load_checkpoint("nowhere")
first = engine.global_steps
for rows in loader:
    engine.backward(engine(rows).square().mean())
    engine.step()
    if sys.argv[1] == "kill" and engine.global_steps == 13 and first == 0:
        engine.copy_due()
        engine.checkpointer.wait_for_copy()
        if engine.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    if engine.global_steps == 20:
        break
total = sum(p.detach().double().sum().item() for p in model.parameters())
os.write(1, f"rank {engine.global_rank} from {first}: {total.hex()}\\n".encode())
"""


def test_doctor_shows_phases_waits_and_stacks_of_a_live_job(run, script, capsys, monkeypatch, tmp_path):
    launch = run("--ranks", "2", "--job", "herring", "--watch", "off", script(WAIT), "her\nring")
    pids = {int(words[1]): int(words[2]) for words in map(str.split, launch.read(2))}
    rates = {key: {"torch": 90.0, "onednn": 200.0} for key in ("forward", "input_gradient", "weight_gradient")}
    (tmp_path / "linear.json").write_text(json.dumps({"torch 2.13.0, some processor, 2 thread(s)": rates}))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    assert main(["doctor", str(pids[1])]) == 0
    page = capsys.readouterr().out
    lines = page.splitlines()
    assert lines[0].startswith("job herring, attempt 1 of 1, for ")
    assert f"\ncommand: {tmp_path}/script.py 'her\nring'\nhost " in page
    rows = {int(line.split()[0]): line for line in lines if line.split()[1:2] in ([str(pids[0])], [str(pids[1])])}
    assert sorted(rows) == [0, 1]
    assert " between " in rows[1]
    assert "stacks of rank 1:" in page
    assert "in lurk" in page
    assert "kernels.linear 'auto': torch 2.13.0, some processor, 2 thread(s): linear layers: forward onednn, " in page
    assert main(["doctor", "herring", "--no-stacks"]) == 0
    assert "stacks of" not in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"there are .*herring"):
        doctor._only("mackerel", doctor._matching("mackerel"))
    launch.kill()


def test_doctor_reads_the_report_that_a_failed_job_left(run, script, tmp_path, capsys):
    logs = tmp_path / "logs"
    code, _, _ = run("--ranks", "1", "--log-dir", str(logs), script("raise ValueError('no such herring')")).end()
    assert code == 1
    assert (logs / REPORT).exists()
    assert main(["doctor", str(logs)]) == 0
    report = capsys.readouterr().out
    assert "rank 0 of 1 failed: ValueError: no such herring" in report
    assert "attempt 1 of 1" in report
    assert "torch " in report
    code, _, _ = run("--ranks", "1", "--log-dir", str(logs), script("print('herring')")).end()
    assert code == 0
    assert main(["doctor", str(logs)]) == 2, "the job that failed is not the last one with these logs"


def kill_launcher(run: Any, target: str, logs: Path, *words: str) -> Any:
    """Start two ranks, kill the launcher once both lurk, and return it once nothing of its launch is left."""
    launch = run(*words, "--log-dir", str(logs), target)
    for rank in range(2):
        while not (said := (logs / f"rank{rank}.out")).exists() or not said.read_text():
            launch.read(1)
    os.kill(launch.pid, signal.SIGKILL)
    launch.wait_until_gone()
    deadline = time.monotonic() + SECONDS
    while list(Path("/dev/shm").glob(f"shoal-*-{launch.pid}-*")):  # the guardian removes it once it has written the page
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return launch


def test_doctor_reads_the_page_that_the_guardian_of_a_killed_launcher_left(run, script, tmp_path, capsys):
    logs = tmp_path / "logs"
    launch = kill_launcher(run, script(WAIT), logs, "--ranks", "2")
    assert main(["doctor", str(logs)]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"---- the process {launch.pid} of `shoal run` on {socket.gethostname()} was killed, and its ")
    assert f"; agent {launch.pid} has ended\ncommand: {tmp_path}/script.py\nhost " in page
    assert [line.split()[3:5] for line in page.splitlines() if line.split()[:1] in (["0"], ["1"])] == [
        ["3", "backward"], ["3", "between"]], page
    assert "torch " in page


def test_a_failed_host_sends_its_page_to_the_logs_of_the_launcher(run, script, tmp_path, capsys):
    logs = tmp_path / "logs"
    target = script(WAIT.replace("def lurk():", "if engine.global_rank: raise ValueError('no such herring')\ndef lurk():"))
    code, _, err = run("--hosts", f"{socket.gethostname()}:0@localhost:0", "--log-dir", str(logs), target).end()
    assert code == 1
    assert "rank 1 of 2 failed: ValueError: no such herring" in err
    assert "command: " not in err
    assert main(["doctor", str(logs)]) == 0
    report, _, page = capsys.readouterr().out.partition("\n\njob ")
    assert "ValueError: no such herring" in report
    assert page.startswith("shoal, attempt 1 of 1, for ")
    assert "torch " in page and re.search(r"memory [\d.]+ [MG]iB of [\d.]+ [MG]iB available, [\d.]+ [KMGT]iB free in ", page)
    assert [line.split()[0] for line in page.splitlines() if " ended " in line] == ["1"]


def test_a_host_whose_launcher_is_killed_leaves_its_page(run, script, tmp_path, capsys):
    logs = tmp_path / "logs"
    kill_launcher(run, script(WAIT), logs, "--hosts", "localhost:0,1")
    assert main(["doctor", str(logs)]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"---- {socket.gethostname()} has lost the launcher, which was killed, stopped or cut off, a")
    assert [line.split()[2:5] for line in page.splitlines() if line.split()[:1] in (["0"], ["1"])] == [
        ["ended", "3", "backward"], ["ended", "3", "between"]], page


def test_a_folder_does_not_hide_the_job_of_its_name(tmp_path, capsys, monkeypatch):
    memory = tmp_path / "memory"
    memory.mkdir()
    record = JobRecord(job="herring", agent=os.getpid(), attempt=0, attempts=1, began=0.0, command=["x.py"], ranks=[],
                       pids=[], error_files=[])
    monkeypatch.setattr(doctor, "jobs", lambda: {memory: record})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "herring").mkdir()
    (tmp_path / "herring" / REPORT).write_text("the report of another job")
    assert main(["doctor", "herring"]) == 0
    assert capsys.readouterr().out.startswith("job herring, attempt 1 of 1, for ")
    assert main(["doctor", "./herring"]) == 0
    assert capsys.readouterr().out == "the report of another job\n"


def test_copies_are_listed_by_engine_and_step(tmp_path):
    record = JobRecord(job="herring", agent=os.getpid(), attempt=0, attempts=1, began=0.0, command=["x.py"], ranks=[],
                       pids=[], error_files=[])
    for name in ("vault1/step2", "vault0/step10", "vault0/step8", "vault0/.shoal-saving-step12"):
        (tmp_path / name).mkdir(parents=True)
    page = doctor.page_of(tmp_path, record, with_stacks=False)
    assert "copies in memory: step8 (0 B), step10 (0 B), step2 (0 B)" in page


def test_doctor_of_nothing_says_what_there_is(tmp_path, capsys):
    for target in ("a" * 300, ""):
        assert main(["doctor", target]) == 2
        assert f"no job, process or folder {target!r} on" in capsys.readouterr().err
    assert main(["doctor", "1" * 5000]) == 2
    assert "no job, process or folder '1111" in capsys.readouterr().err
    assert main(["doctor", "no-such-job"]) == 2
    assert "no job, process or folder 'no-such-job' on" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path)]) == 2
    assert f"{tmp_path}: has no {REPORT}: the job with these logs runs still, has ended well or by a signal, or its " in (
        capsys.readouterr().err)


def test_doctor_reads_damaged_reports_and_names_those_it_cannot(tmp_path, capsys):
    (tmp_path / REPORT).write_bytes(b"died of \xff\n")
    assert main(["doctor", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("died of ")
    (tmp_path / REPORT).unlink()
    (tmp_path / REPORT).mkdir()
    assert main(["doctor", str(tmp_path)]) == 2
    assert f"{tmp_path / REPORT}: cannot be read: Is a directory" in capsys.readouterr().err


def test_a_report_survives_copies_that_go_and_text_that_is_none(run, script, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    assert doctor._bytes(gone) == 0
    (tmp_path / "link").symlink_to(gone)
    (tmp_path / "file").write_bytes(b"four")
    assert doctor._bytes(tmp_path) == 4
    target = script(r"raise ValueError('her\udcffring')")
    code, _, err = run("--ranks", "1", "--log-dir", str(tmp_path / "logs"), target).end()
    assert code == 1
    assert "Traceback" not in err.replace("Traceback (most recent call last):\n  File", "", 1)
    assert r"her\udcffring" in (tmp_path / "logs" / REPORT).read_text()


def test_a_report_is_left_by_a_job_whose_working_folder_is_gone(run, script, tmp_path):
    (tmp_path / "work").mkdir()
    target = script("import os; os.rmdir(os.getcwd()); raise ValueError('no such herring')")
    code, _, err = run("--ranks", "1", "--log-dir", str(tmp_path / "logs"), target, folder=str(tmp_path / "work")).end()
    assert code == 1
    assert "FileNotFoundError" not in err
    assert "rank 0 of 1 failed: ValueError: no such herring" in (tmp_path / "logs" / REPORT).read_text()


def test_a_record_without_room_leaves_none_of_another_attempt(tmp_path):
    record = JobRecord(job="herring", agent=1, attempt=0, attempts=1, began=0.0, command=[], ranks=[], pids=[],
                       error_files=[])
    write_record(str(tmp_path), record)
    (tmp_path / "job.json.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        write_record(str(tmp_path), record)
    assert list(tmp_path.iterdir()) == []


def test_a_launch_without_room_in_memory_runs_unseen(start, script):
    full = 'mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero > /dev/shm/full && exec "$@"'
    launch = start("unshare", "--mount", "sh", "-c", full, "sh", sys.executable, "-m", "shoal", "run", "--ranks", "1",
                   script("print('herring')"))
    code, out, err = launch.end()
    if "unshare failed" in err or "mount: " in err:
        pytest.skip(f"needs a mount namespace: {err.strip()}")
    assert (code, out) == (0, "herring\n")
    (line,) = err.splitlines()
    assert "the record of this attempt cannot be written in /dev/shm/shoal-" in line
    assert line.endswith("The job goes on, and `shoal doctor` does not find it; make room in /dev/shm")


def test_a_killed_rank_costs_only_the_steps_since_the_last_copy(run, script, tmp_path):
    code, out, err = run("--ranks", "2", "--max-restarts", "1", script(SURVIVE), "kill", folder=str(tmp_path)).end()
    assert code == 0, err
    assert f"rank 1 of 2 failed: killed by {signal.SIGKILL.name}" in err
    code, undisturbed, err = run("--ranks", "2", script(SURVIVE), "run", folder=str(tmp_path)).end()
    assert code == 0, err
    assert sorted(out.splitlines()) == [line.replace("from 0", "from 10") for line in sorted(undisturbed.splitlines())]
