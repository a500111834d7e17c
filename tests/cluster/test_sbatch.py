"""`shoal sbatch` in a real Slurm: SIGUSR1 saves, and the next start ends with the weights of an undisturbed run."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.launch.cli import main

SECONDS = 300.0

TRAIN = """
import hashlib, os, signal, sys, torch, shoal
from pathlib import Path

folder, stop_at = Path(sys.argv[1]), int(sys.argv[2])
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
engine, *_ = shoal.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2}})
if "--resume" in sys.argv:
    engine.load_checkpoint(folder / "saved")
    if engine.global_rank == 0:
        (folder / "resumed").write_text(str(engine.global_steps))
while engine.global_steps < 12:
    draw = torch.Generator().manual_seed(100 * engine.global_rank + engine.global_steps)
    x = torch.randn(4, 8, generator=draw)
    engine.backward(torch.nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True)))
    engine.step()
    if engine.global_steps == stop_at and "--resume" not in sys.argv:
        (folder / f"waits{engine.global_rank}").touch()
        while not asked:
            signal.sigtimedwait([], 0.05)
        engine.save_checkpoint(folder / "saved")
        engine.wait_for_checkpoint()
        sys.exit(0)
text = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
(folder / f"end{engine.global_rank}").write_text(hashlib.sha256(text).hexdigest())
"""


def until(path: Path, said) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never came: {said()}"
        time.sleep(0.05)


@pytest.mark.parametrize("requeues", [True, False])
def test_a_job_that_saved_at_its_limit_goes_on_when_it_starts_again(slurm, tmp_path, requeues):
    (tmp_path / "train.py").write_text(TRAIN)
    for name in ("plain", "stopped"):
        (tmp_path / name).mkdir()
    plain = subprocess.run([sys.executable, "-m", "shoal", "run", "--ranks", "2", str(tmp_path / "train.py"),
                            str(tmp_path / "plain"), "0"], capture_output=True, text=True, timeout=SECONDS)
    assert plain.returncode == 0, plain.stderr

    log, folder = tmp_path / "log", tmp_path / "stopped"

    def said() -> str:
        queue = slurm.execute(["scontrol", "show", "job"]).stdout
        return f"{queue}\n{log.read_text() if log.exists() else ''}\n{slurm.said()}"

    def submit(option: str, *more: str) -> str:
        assert main(["sbatch", "--nodes", "2", "--ranks", "1", "--log", str(log), "--output", str(tmp_path / "job.sh"),
                     option, str(tmp_path / "train.py"), str(folder), "5", *more]) == 0
        job = slurm.execute(["sbatch", "--parsable", str(tmp_path / "job.sh")])
        assert job.returncode == 0, job.stderr
        return job.stdout.strip()

    number = submit("--resume-args=--resume") if requeues else submit("--no-requeue")
    for rank in range(2):
        until(folder / f"waits{rank}", said)
    assert slurm.execute(["scancel", "--batch", "--signal=USR1", number]).returncode == 0
    if not requeues:
        deadline = time.monotonic() + SECONDS
        while "ExitCode=143:0" not in slurm.execute(["scontrol", "show", "job", number]).stdout:
            assert time.monotonic() < deadline, said()
            time.sleep(0.1)
        submit("--no-requeue", "--resume")
    for rank in range(2):
        until(folder / f"end{rank}", said)
    assert (folder / "resumed").read_text() == "5"
    assert [(folder / f"end{rank}").read_text() for rank in range(2)] == [
        (tmp_path / "plain" / f"end{rank}").read_text() for rank in range(2)]


@pytest.mark.parametrize(("words", "message"), [
    (["--ranks", "0", "x.py"], "--ranks: got 0; choose 1 or more"),
    (["--ranks", "1", "--name", "a\nb", "x.py"], "--name: got 'a\\nb'; a directive is one line"),
    (["--ranks", "1", "--run-args", "'", __file__], "--run-args: got \"'\": No closing quotation; quote its words"),
    (["--ranks", "1", "--output", __file__, __file__], f"--output {__file__}: is SCRIPT itself, which it would overwrite"),
    (["--ranks", "1", "--output", "/no/such", __file__], "--output /no/such: cannot be written: No such file or directory"),
    (["--ranks", "1", "--resume-args", "'", __file__], "--resume-args: got \"'\": No closing quotation; quote its words"),
    *((["--ranks", "1", f"--directive={line}", "x.py"], f"--directive: got {line!r}, which this command writes itself; {to}")
      for line, to in (("--time=9", "give --time"), ("-t 9", "give --"), ("-t9", "give --time"), ("-N 2", "give --nodes"),
                        ("--signal=TERM", "give --grace"))),
    *((["--ranks", "1", f"--directive={line}", __file__], f"--directive: got {line!r}; give an option of sbatch, such as")
      for line in ("", "gres=gpu:8", "#SBATCH --mem=1", "-", "--")),
    (["--ranks", "1", "no-such.py"], "no script 'no-such.py' in "),
    (["--ranks", "1", "--time", "zzz", __file__], "--time: got 'zzz'; write MINUTES, MINUTES:SECONDS, HOURS:MINUTES"),
    (["--ranks", "1", "--time", "1:2:3:4", __file__], "--time: got '1:2:3:4'; write MINUTES, "),
    (["--ranks", "1", "--time", "1-", __file__], "--time: got '1-'; write MINUTES, "),
    (["--ranks", "1", "--time", "", __file__], "--time: got ''; write MINUTES, "),
    (["--ranks", "1", "--time", "0:30", __file__], "--time: got 0:30, which is 30 s, with --grace 90: Slurm sends the "
     "signal 120 s before the limit, or up to 60 s earlier, so that each start would end at once, without end; give more"),
    (["--ranks", "1", "--time", "1-0:1", "--grace", "86400", __file__], "--time: got 1-0:1, which is 86460 s, with "),
    (["--ranks", "1", "--run-args=--max-restarts -1", __file__], "--run-args: --max-restarts: got -1; choose 0 (never"),
    (["--ranks", "1", "--run-args", "--ranks 7", __file__], "--run-args: got --ranks 7, which the script sets for itself"),
    (["--ranks", "1", "--run-args", "--grace 7200", __file__], "--run-args: got --grace 7200.0, which the script sets for"),
    (["--ranks", "1", "--run-args", "--nodes 3", __file__], "--run-args: got --nodes 3, which the script sets for itself"),
    (["--ranks", "1", "--run-args", "--hosts a:0", __file__], "--run-args: got --hosts a:0, which the script sets for"),
    (["--ranks", "1", "--run-args", "--launcher ssh", __file__], "--run-args: got --launcher ssh, which the script sets"),
    (["--ranks", "1", "--run-args=--no-such", __file__], "--run-args: unrecognized arguments: --no-such"),
    (["--ranks", "1", "--run-args", "x.py", __file__], "--run-args: got 'x.py', which is no option of `shoal run`"),
    (["--ranks", "1", "--run-args", "--env X", __file__], "--run-args: --env: got 'X'; write NAME=VALUE"),
    (["--ranks", "1", "--run-args=--max-restarts", __file__], "--run-args: argument --max-restarts: invalid int value: "),
])  # fmt: skip
def test_a_script_that_cannot_be_is_refused(capsys, words, message):
    assert main(["sbatch", *words]) == 2
    assert f"shoal sbatch: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["0", "4", "3:01", "4:00:00", "1-0", "1-0:0", "1-0:0:0", "00:03:01"])
def test_the_limits_of_slurm_are_written_as_they_are(capsys, limit):
    assert main(["sbatch", "--ranks", "1", "--time", limit, "--run-args=--max-restarts 2", __file__]) == 0
    shown = capsys.readouterr().out
    assert f"#SBATCH --time={limit}\n" in shown
    assert " --grace 90 --max-restarts 2 " in shown


def test_a_module_is_started_as_one(capsys):
    assert main(["sbatch", "--ranks", "1", "-m", "json.tool", "-m"]) == 0
    assert ' --grace 90 --module json.tool -m "${more[@]}" &' in capsys.readouterr().out


def test_words_that_are_no_text_arrive_byte_for_byte(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "-m", "shoal", "sbatch", "--ranks", "1"]
    shown = subprocess.run([*command, __file__, b"\xff"], env=environment, capture_output=True, check=True).stdout
    assert f"{__file__} '".encode() + b"\xff' \"${more[@]}\" &" in shown
    subprocess.run([*command, "--output", tmp_path / "job.sh", __file__, b"\xff"], env=environment, check=True)
    assert (tmp_path / "job.sh").read_bytes() == shown


def test_words_are_quoted_in_the_script(capsys, tmp_path):
    (tmp_path / "a b.py").touch()
    assert main(["sbatch", "--ranks", "1", "--name", 'a "b"', "--resume-args", "'$y z' -w",
                 str(tmp_path / "a b.py"), "$x"]) == 0
    text = capsys.readouterr().out
    assert '#SBATCH --job-name="a \\"b\\""\n#SBATCH --nodes=1\n' in text
    assert f"'{tmp_path}/a b.py' '$x' \"${{more[@]}}\" &" in text
    assert "more=('$y z' -w)\n" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
