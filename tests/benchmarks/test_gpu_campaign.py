"""The campaigns for a machine with a GPU run small without one, row by row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gpu_facts
import gpu_states
import gpu_steps
import machine
import pytest
import torch
from gpu_campaign import CARRIED, MINUTES, Measured, Row, Scale, missing, share
from tests.late import build, group

from shoal.device import DeviceEvent
from shoal.testing import run_ranks

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SMALL = Scale(device=torch.device("cpu"), small=True, path="")
CAMPAIGNS: dict[str, dict[str, Row]] = {"facts": gpu_facts.ROWS, "steps": gpu_steps.ROWS, "states": gpu_states.ROWS}


def _row(benchmark: str, row: str, path: str) -> Measured:
    sys.path.insert(0, str(BENCHMARKS))
    return __import__(benchmark).ROWS[row].run(Scale(device=torch.device("cpu"), small=True, path=path))


@pytest.mark.parametrize(("benchmark", "row", "has"), [
    ("gpu_facts", "copies", "up, pinned GB/s"), ("gpu_facts", "pages", "GB/s"), ("gpu_facts", "stages", "all on disk"),
    ("gpu_steps", "stage-0", "ms x1"), ("gpu_steps", "first-of-8-stage-3", "mfu x1"),
    ("gpu_steps", "attention", "float16 times"), ("gpu_steps", "layer", "times, dropout 0.1"),
    ("gpu_steps", "packing", "unpack, billions/s"),
    ("gpu_states", "host-all", "host GiB"), ("gpu_states", "save", "loaded s"), ("gpu_states", "fsdp2-host", "ms x1"),
    ("gpu_states", "largest", "of all bytes"), ("gpu_states", "disk", "ms x1"),
])
def test_a_row_of_a_campaign_runs_small_on_the_cpu(benchmark: str, row: str, has: str, tmp_path: Path) -> None:
    assert has in run_ranks(1, _row, benchmark, row, str(tmp_path))[0]


@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_the_shares_of_all_rows_fit_into_the_ten_minutes(campaign: str) -> None:
    assert sum(row.seconds for row in CAMPAIGNS[campaign].values()) <= 60 * MINUTES


def test_a_row_gets_what_earlier_ones_left_and_no_share_of_a_later_one() -> None:
    rows = {name: Row(run=lambda scale: {}, seconds=seconds) for name, seconds in (("a", 30), ("b", 40), ("c", 20))}
    assert share(rows, ["a", "b", "c"], "b", 90) == 70
    assert share(rows, ["a", "b", "c"], "b", 50) == 40
    assert share(rows, ["a", "b", "c"], "b", 25) == 25
    assert share(rows, ["a", "c"], "c", 90) == 90


def test_what_is_due_comes_first_and_flex_attention_last() -> None:
    names = list(gpu_facts.ROWS)
    assert names[:6] == ["stages", "races", "delays", "tests-one_gpu", "tests-offload", "ranks"]
    assert names[-2:] == ["tests-attention", "tests-flex"]
    assert {file.stem.removeprefix("test_") for file in ROOT.glob("tests/gpu/test_*.py")} <= {
        name.removeprefix("tests-") for name in names}


OF_TESTS = """
import threading, warnings

def test_one():
    warnings.warn("the first use of a GPU")

def test_two():
    raise ValueError("no")

def test_three():
    assert threading.Event().wait({wait})
"""


def test_a_row_of_tests_that_is_cut_has_told_the_tests_that_ended(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(OF_TESTS.format(wait=30))
    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import gpu_facts; gpu_facts._tests({str(file)!r})"
    told: list[Measured] = []
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            told.append(json.loads(line.removeprefix("measured: ")))
            if "failed" in told[-1]:
                break
        os.killpg(process.pid, signal.SIGKILL)
    assert [sorted(each) for each in told] == [["all", "passed"], ["all", "failed", "first", "passed"]]
    assert told[-1]["all"][0].endswith("::test_two")


def test_a_warning_of_a_gpu_fails_no_test_of_a_campaign(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(OF_TESTS.format(wait=0))
    found = gpu_facts._tests(str(file), "-c", str(ROOT / "pyproject.toml"))
    assert (found["passed"], found["failed"]) == (1, 2)
    assert found["first"].endswith("::test_two - ValueError: no")
    documented = [line for line in (ROOT / "docs/devices.md").read_text().splitlines() if ".venv/bin/pytest" in line]
    assert documented and all("-W default" in line for line in documented)


def test_cuda_builds_the_staged_group_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked: list[str] = []
    monkeypatch.setattr(build, "_folder", lambda compiler: tmp_path)
    monkeypatch.setattr(build, "_compiled", lambda compiler, folder, name: folder / name)
    monkeypatch.setattr(build, "_link", lambda compiler, library, objects: linked.append(library.name))
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(group, "build", build.build.__wrapped__)
    with pytest.raises(ImportError):  # nothing was compiled
        group._native.__wrapped__("staged_group")  # pyright: ignore[reportPrivateUsage]
    assert linked == ["staged_group.so"]


def test_the_memory_of_a_host_is_that_of_its_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = machine.memory(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory(tmp_path) == whole
    (tmp_path / "memory.max").write_text(f"{whole - 1}\n")
    assert machine.memory(tmp_path) == whole - 1
    monkeypatch.setattr("shoal.tier.memory_left.memory_left", lambda: 12345)
    assert machine.available() == 12345


def test_facts_are_told_where_shoal_is_only_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", version)
    assert machine.facts()["shoal"] == "not installed"


def test_the_packages_that_are_carried_are_those_that_shoal_imports() -> None:
    assert {"numpy", "pydantic", "rich", "safetensors"} <= {*CARRIED}


@pytest.mark.parametrize("name", ["stages", "steps"])
def test_a_wait_for_an_event_counts_as_a_wait_of_the_host(name: str) -> None:
    event: Any = Mock()
    if name == "stages":
        with pytest.raises(RuntimeError, match="waited for events"), gpu_facts._without_waits(SMALL.device, forbidden=True):
            DeviceEvent.synchronize(event)
    else:
        system = gpu_steps.System(step=lambda x: DeviceEvent.synchronize(event), flops=1.0, parameters=1)
        assert gpu_steps._waits(system, torch.zeros(1)) == 1
    event._event.synchronize.assert_called_once()


def test_mfu_is_told_of_the_data_sheet_too_where_one_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    on_gpu = Scale(device=torch.device("cuda"), small=True, path="")
    assert gpu_steps._of_sheet(on_gpu, 494.5e12) == {"of sheet": 0.5}
    assert gpu_steps._of_sheet(SMALL, 494.5e12) == {}


def test_a_save_is_of_a_model_that_was_built_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Built(Exception):
        pass

    def built(scale: Scale, size: str) -> None:
        raise Built(torch.get_default_device())

    monkeypatch.setattr(gpu_states, "build", built)
    with pytest.raises(Built, match="meta"):
        gpu_states.save(Scale(device=torch.device("meta"), small=True, path=""))


def test_the_largest_model_tries_the_smaller_batch_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def measured(scale: Scale, system: object, batches: tuple[int, ...], *steps: int, **options: object) -> Measured:
        asked.append(batches)
        return {}

    monkeypatch.setattr(gpu_states, "_shoal", lambda *arguments: Mock(parameters=1))
    monkeypatch.setattr(gpu_states, "measured", measured)
    gpu_states.largest(SMALL)
    assert asked == [(1, 8)]


def test_the_reserve_of_the_largest_model_holds_its_largest_batch() -> None:
    blocks, _ = gpu_states.fill(149e9, 130e9)
    assert gpu_states.working(blocks, max(gpu_states.RISING)) <= gpu_states.WORKING


@pytest.mark.parametrize(("gpu", "host"), [(149e9, 130e9), (84e9, 130e9), (84e9, 20e9), (0.0, 130e9)])
def test_the_largest_model_fills_the_gpu_and_the_host(gpu: float, host: float) -> None:
    states = gpu_states
    blocks, ratio = states.fill(gpu, host)
    elements = blocks * 12 * states.WIDTH**2
    on_host, on_gpu = elements * (states.OFF + states.STATE * ratio), elements * states.STATE * (1 - ratio)
    assert on_host <= states.FULL * host * 1.001 and on_gpu <= max(0.0, gpu - states.WORKING)
    if blocks:
        assert on_host + on_gpu > 0.9 * states.FULL * min(max(0.0, gpu - states.WORKING) + host, 8 * host)


def test_a_campaign_writes_what_its_rows_have_measured(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, BENCHMARKS / "gpu_facts.py", "--small", "--rows", "matmul", "--out", out, "--path", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["raw"]["matmul"]["TFLOP/s"] > 0


SLOW = """
import sys
{first}
sys.path.insert(0, {benchmarks!r})
from gpu_campaign import Row, campaign, tell

def broken(scale):
    tell({{"first": 1.0}})
    tell({{"first": 1.0, "second": 2.0}})
    raise ValueError("no third")

def working(scale):
    return {{"only": 3.0}}

campaign("broken", __file__, "", {{"broken": Row(run=broken, seconds=9), "working": Row(run=working, seconds=9)}})
"""


def test_a_row_that_fails_keeps_what_it_has_told(tmp_path: Path) -> None:
    script, out = tmp_path / "slow.py", tmp_path / "found.json"
    script.write_text(SLOW.format(first="", benchmarks=str(BENCHMARKS)))
    command = [sys.executable, script, "--small", "--out", out, "--path", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(out.read_text())["raw"]
    assert done.returncode == 1 and found["working"] == {"only": 3.0}
    assert found["broken"].pop("stderr")
    assert found["broken"] == {"first": 1.0, "second": 2.0, "failure": "ValueError: no third"}


def test_a_campaign_whose_tables_fail_keeps_its_rows(tmp_path: Path) -> None:
    script, out = tmp_path / "slow.py", tmp_path / "found.json"
    script.write_text(SLOW.format(first='sys.modules["results"] = None  # cannot be imported', benchmarks=str(BENCHMARKS)))
    command = [sys.executable, script, "--small", "--rows", "working", "broken", "--out", out, "--path", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(out.read_text())["raw"]
    assert found["working"] == {"only": 3.0} and found["broken"]["second"] == 2.0
    assert "broken: no tables" in done.stderr


def test_a_campaign_without_its_packages_ends_at_once(tmp_path: Path) -> None:
    code = (f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); sys.argv = ['x', '--small']; import gpu_campaign as it; "
            f"it.CARRIED += ('no_such_package',); it.campaign('facts', '', '', {{}})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert "no no_such_package: carry the wheels" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_a_campaign_without_a_gpu_says_what_is_missing() -> None:
    assert any("no CUDA device" in line for line in missing())


def test_a_row_takes_the_steps_that_it_says() -> None:
    taken = list[int]()
    system = gpu_steps.System(step=lambda x: taken.append(len(x)), flops=1.0, parameters=1)
    found = gpu_steps.measured(SMALL, system, (8,), 2, warm=1, looks=False)
    assert len(taken) == 3 and found["ms x1"] >= 0
