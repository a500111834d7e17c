"""The manifests of Kubernetes and SkyPilot parse, and what they run exists and is understood."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="needs PyYAML; pip install pyyaml")
ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"


def load(name):
    return yaml.safe_load((CLUSTER / name).read_text())


def test_every_replica_of_the_pytorchjob_runs_a_script_that_is_there():
    job = load("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: replica["replicas"] for name, replica in replicas.items()} == {"Master": 1, "Worker": 3}
    for replica in replicas.values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        program, *words = container["command"]
        assert program == "torchrun"
        assert all((ROOT / word).is_file() for word in words if word.startswith("examples/"))
        assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == job["spec"]["nprocPerNode"]
        volumes = {volume["name"] for volume in replica["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_the_skypilot_task_is_a_command_line_of_shoal_run(tmp_path):
    task = load("skypilot.yaml")
    assert task["workdir"] == "."
    assert "\ninstall:" in (ROOT / "Makefile").read_text() and task["setup"].split() == ["make", "install"]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shoal = tmp_path / ".venv" / "bin" / "shoal"
    shoal.parent.mkdir(parents=True)
    shoal.write_text(f'#!/bin/sh\necho "$@"\nshift\nexec {shlex.quote(sys.executable)} -m shoal run --dry-run "$@"\n')
    shoal.chmod(0o755)
    variables = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
                 "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].partition(":")[2],
                 "SKYPILOT_NODE_RANK": "1"}
    done = subprocess.run(["bash", "-eu", "-c", task["run"]], cwd=tmp_path, env={**os.environ, **variables}, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    given, *shown = done.stdout.splitlines()
    assert shown[0] == "this node of 2, rendezvous 10.0.0.1:29400, 8 ranks"
    assert given.startswith("run --nodes 2 --ranks 8 --rendezvous 10.0.0.1:29400 --node-rank 1 examples/gpt/train.py")
    assert shown[-1] == "each rank runs: python examples/gpt/train.py --shoal-config examples/gpt/zero3.json"
