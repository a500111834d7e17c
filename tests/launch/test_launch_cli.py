"""The command line explains itself and rejects invalid input before any process starts."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from shoal.launch.cli import main
from shoal.version import __version__


def error_of(capsys, *words):
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    names = ("run", "check-cluster", "sbatch", "config", "checkpoint", "disk", "pipeline", "attention")
    assert all(f"\n  {name} " in shown for name in names)


def test_no_command_prints_the_help(capsys):
    assert main([]) == 2
    assert "usage: shoal COMMAND" in capsys.readouterr().out


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"shoal {__version__}\n"


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii"])
def test_words_that_are_no_text_are_shown_with_escapes(encoding):
    command = [sys.executable, "-m", "shoal", "run", "--dry-run", "--hosts", "a:0", __file__, b"\xff", "\u00e9"]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHON\udcff": ""}, capture_output=True,
                          check=True)
    assert rb"'\udcff' " in done.stdout
    assert rb"PYTHON\udcff" in done.stdout


@pytest.mark.parametrize(("words", "unbuffered"), [
    (["--help"], ""), (["--help"], "1"), (["run", "--dry-run", __file__], ""), (["run", "--dry-run", __file__], "1"),
    (["run", "--help"], ""),
])  # fmt: skip
def test_a_command_whose_output_cannot_be_written_says_so_in_a_line(words, unbuffered):
    command = [sys.executable, "-m", "shoal", *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == f"shoal {command[3]}: the standard output cannot be written: No space left on device\n"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, ""), "its reader has what it wants"


def test_a_working_folder_that_has_been_removed_is_refused(tmp_path):
    script = 'cd "$1" && rmdir "$1" && exec "$2" -m shoal run --ranks 1 "$3"'
    done = subprocess.run(["sh", "-c", script, "sh", tmp_path, sys.executable, __file__], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "shoal run: the working folder has been removed; change to one that exists\n"


def test_a_mistyped_command_suggests_the_nearest_one(capsys):
    message = error_of(capsys, "rnu")
    assert ("there is no command 'rnu'; choose run, doctor, check-cluster, sbatch, config, checkpoint, disk, pipeline, "
            "attention; did you mean `shoal run`?" in message)


def test_a_mistyped_option_suggests_the_nearest_one(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--rank", "2", "train.py"])
    assert "unrecognized arguments: --rank; did you mean --ranks?" in capsys.readouterr().err


def test_a_script_without_run_gets_a_hint(capsys):
    assert "start a script with `shoal run SCRIPT`" in error_of(capsys, "./train.py")


def test_the_command_line_does_not_import_torch():
    code = ("import sys, types; package = types.ModuleType('shoal'); package.__path__ = [sys.argv[1]];"
            "sys.modules['shoal'] = package; from shoal.launch.cli import main; main(['--help']);"
            "import shoal.launch.run; sys.exit('torch' in sys.modules)")
    import shoal

    done = subprocess.run([sys.executable, "-c", code, shoal.__path__[0]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("words", "message"), [
    (["--ranks", "0", "x.py"], "--ranks: got '0'; choose a whole number, 1 or more, or auto"),
    (["--ranks", "two", "x.py"], "--ranks: got 'two'; choose a whole number, 1 or more, or auto"),
    (["--nodes", "0", "x.py"], "--nodes: got '0'; choose a whole number, 1 or more"),
    (["--nodes", "3:2", "x.py"], "--nodes 3:2: the minimum exceeds the maximum; write A:B with A at most B"),
    (["--nodes", "2", "x.py"], "--nodes 2: several nodes need --rendezvous HOST:PORT, the same on each of them"),
    (["--node-rank", "0", "x.py"],
     "--node-rank: it selects the node that hosts the rendezvous; give --rendezvous HOST:PORT too"),
    (["--rendezvous", "node0", "x.py"], "--rendezvous: got 'node0'; write HOST:PORT, such as node0:29500"),
    (["--rendezvous", "node0:0", "x.py"], "--rendezvous: got 'node0:0'; write HOST:PORT, such as node0:29500"),
    (["--job", "", "x.py"], "--job: got an empty name; give one, the same on each node"),
    (["--max-restarts", "-1", "x.py"], "--max-restarts: got -1; choose 0 (never restart) or more"),
    (["--grace", "inf", "x.py"], "--grace: got inf seconds; choose 0 (kill at once) or more, up to 1e+09"),
    (["--grace", "-1", "x.py"], "--grace: got -1 seconds; choose 0 (kill at once) or more"),
    (["--module", "--no-python", "x"], "--module and --no-python: SCRIPT cannot be both a Python module and a program"),
    (["--no-python", "no-such-program"], "no program 'no-such-program' on the path or in "),
    (["--no-python", __file__], f"{__file__!r} may not be executed; run `chmod +x {__file__}`, or leave --no-python out"),
    (["/dev/null"], "'/dev/null' is no regular file, and can be read once, by one rank; give the path of a file"),
    (["--ranks", "9" * 5000, __file__], "--ranks: got '999999999'...; choose a whole number of at most 9 digits"),
    (["--dry-run", "--core-list", "99999", __file__], f"--core-list: {socket.gethostname()} has no core 99999 for this job"),
    (["--dry-run", "--log-dir", f"{__file__}/a/b", __file__], f"--log-dir {__file__}/a/b: the folder cannot be made: "),
    (["--dry-run", "--log-dir", "/proc/x/y", __file__], "--log-dir /proc/x/y: nothing can be made in /proc: "),
    (["--dry-run", "--hosts", "a:0", "--log-dir", "/proc/x", __file__], "--log-dir /proc/x: nothing can be made in /proc: "),
    (["no-such-script.py"], "no script 'no-such-script.py' in "),
    (["--module", "no_such_module"], "no module 'no_such_module' in "),
    (["."], "'.' is a folder without a __main__.py; name a script in it"),
    (["--env", "NAME", __file__], "--env: got 'NAME'; write NAME=VALUE"),
    (["--env", "RANK=5", __file__], "--env RANK=5: the launcher sets RANK for each rank; drop it, or choose the address"),
    *(([*words, __file__], f"{words[0].partition('=')[0]}: it is for hosts that are started from here; give --hostfile ")
      for words in (["--setup", "x.sh"], ["--ssh-port", "22"], ["--lost-after", "3"], ["--launcher-args=-x"],
                    ["--export", "FOO*"], ["--exclude", "a"])),
])
def test_invalid_launch_options_are_rejected(capsys, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    assert f"shoal run: {message}" in error_of(capsys, "run", *words)


def test_a_syntax_error_is_shown_once_before_any_rank_starts(capsys, tmp_path):
    path = tmp_path / "script.py"
    path.write_text("good = 1\nbad = = 2\n")
    assert error_of(capsys, "run", "--ranks", "2", str(path)) == (
        f"shoal run: {path}, line 2: invalid syntax\n    bad = = 2\n          ^\n")


def test_a_script_that_is_not_text_is_rejected(capsys, tmp_path):
    path = tmp_path / "script.py"
    path.write_bytes(b"\0")
    assert "cannot be read as Python: source code string cannot contain null bytes" in error_of(capsys, "run", str(path))
