"""The failure report finds the rank that failed first and describes it."""

import signal

import pytest

from shoal.compat.deepspeed.runtime.config import DeepSpeedConfigError
from shoal.errors import ConfigError, GuardError, GuardRewind, NotServed, NotSupportedYet, UnknownKind, UsageError
from shoal.launch import rank
from shoal.launch.failure import Failure, describe, first, is_written, read, reports, signal_name, status_code


def failed(rank, time=1.0, status=1, **more):
    return Failure(rank=rank, local_rank=rank, host="h", pid=100 + rank, status=status, time=time, **more)


def test_the_earliest_exception_is_the_cause():
    assert first([failed(0, time=2.0, summary="ValueError: b"), failed(1, time=1.0, summary="ValueError: a")]).rank == 1


def test_a_lost_connection_is_secondary_even_if_it_came_first():
    summary = "RuntimeError: [/x/gloo/transport/tcp/pair.cc:5] Connection closed by peer [::1]:1"
    secondary = failed(0, time=1.0, summary=summary)
    assert first([secondary, failed(1, time=2.0, status=-9)]).rank == 1


def test_a_collective_timeout_is_a_secondary_failure():
    secondary = failed(0, time=1.0, summary="late", kinds=("shoal.errors.CollectiveTimeout", "builtins.RuntimeError"))
    assert first([secondary, failed(1, time=2.0, summary="KeyError: 1")]).rank == 1


@pytest.mark.parametrize(("error", "final"), [
    (ConfigError, True), (NotSupportedYet, True), (NotServed, True), (UnknownKind, True), (DeepSpeedConfigError, True),
    (GuardError, True), (GuardRewind, False), (UsageError, False), (ValueError, False),
])  # fmt: skip
def test_no_restart_follows_an_error_that_it_would_meet_again(tmp_path, error, final):
    rank.record(str(tmp_path / "error"), error("herring"), "Traceback\nherring\n")
    found = read(str(tmp_path / "error"), rank=0, local_rank=0, pid=7, status=1, time=5.0, stopped=False)
    assert found.final == final


def test_a_rank_that_the_launcher_stopped_is_never_the_cause():
    assert first([failed(0, time=0.0, status=-15, stopped=True), failed(1, time=9.0)]).rank == 1


def test_a_signal_becomes_128_and_its_number():
    assert [status_code(3), status_code(-9)] == [3, 137]


def test_a_signal_without_a_name_keeps_its_number():
    assert [signal_name(signal.SIGABRT), signal_name(250)] == ["SIGABRT", "signal 250"]


def test_the_report_shows_the_cause_and_one_line_per_other_rank():
    secondary = "RuntimeError: [/a/gloo/transport/tcp/pair.cc:5] Connection closed by peer"
    cause = failed(1, summary="ValueError: no", text="Traceback\nValueError: no\n")
    block = describe([failed(0, time=2.0, summary=secondary), cause, failed(2, status=-15, stopped=True)], ranks=3)
    lines = block.splitlines()
    assert lines[0].startswith("---- rank 1 of 3 failed: ValueError: no -----")
    assert lines[2:4] == ["Traceback", "ValueError: no"]
    assert lines[4] == "then rank 0 (host h, pid 100): RuntimeError: Connection closed by peer"
    assert len(lines) == 6


def test_an_error_without_room_for_its_file_goes_to_stderr(tmp_path, capsys):
    (tmp_path / "error.part").symlink_to("/dev/full")
    rank.record(str(tmp_path / "error"), ValueError("herring"), "Traceback\nValueError: herring\n")
    told = f"shoal run: this error cannot be written in {tmp_path}, where the launcher would read it: No space left on "
    assert capsys.readouterr().err.startswith(f"Traceback\nValueError: herring\n{told}")


@pytest.mark.parametrize("text", ["", '{"message": {"mess', "[1]", "7", '"herring"', '{"message": "herring"}', "{}", "\x00",
                                  '{"message": {"message": 1, "extraInfo": {"py_callstack": ""}}}',
                                  '{"message": {"message": "", "extraInfo": {"py_callstack": ""}}, "kinds": [1]}'])
def test_an_error_file_that_is_half_written_or_foreign_leaves_the_exit(tmp_path, text):
    path = tmp_path / "error"
    path.write_text(text)
    assert not is_written(str(path))
    found = read(str(path), rank=1, local_rank=1, pid=7, status=3, time=5.0, stopped=False)
    assert (found.headline, found.time) == ("exit code 3", 5.0)


def test_an_error_file_in_the_format_of_torch_is_read(tmp_path):
    path = tmp_path / "error"
    path.write_text('{"message": {"message": "herring", "extraInfo": {"py_callstack": "at sea", "timestamp": "1"}}}')
    assert is_written(str(path))
    found = read(str(path), rank=1, local_rank=1, pid=7, status=3, time=5.0, stopped=False)
    assert (found.headline, found.text, found.kinds, found.time) == ("herring", "at sea", (), 5.0)


def test_reports_are_the_files_that_launches_write(tmp_path):
    ours = {"failure.txt", "failure.node0.txt", "failure.node12.txt", "failure.my-host.x-123-0f1e2d3c.txt"}
    for name in (*ours, "failures.txt", "failure.notes.txt", "failure.node.txt", "failure.a-b-c.txt"):
        (tmp_path / name).touch()
    assert {path.name for path in reports(tmp_path)} == ours


def test_sigkill_comes_with_its_most_likely_reason():
    assert "ran out of memory" in describe([failed(0, status=-9)], ranks=1)
