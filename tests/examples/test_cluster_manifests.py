"""The manifests of Kubernetes and SkyPilot fit their schemas, and what they run exists and is understood.

The schemas are the part of the published ones that the manifests use, and a little around it: PyTorchJob of kubeflow.org/v1
with the Pod of Kubernetes in it, and a task of SkyPilot. A key that is not in them is refused, as a misspelled one is.
"""

import copy
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

yaml = pytest.importorskip("yaml", reason="needs PyYAML; pip install pyyaml")
ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"


def load(name):
    return yaml.safe_load((CLUSTER / name).read_text())


# The schemas

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
"""A DNS label of RFC 1123, as Kubernetes names objects, containers and volumes."""
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?([EPTGMk]|[EPTGMK]i|m)?$")]


class Keys(BaseModel):
    """A mapping of these keys and no others, whose values have these types: "8" is no number, and 8 is no text."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Kubernetes(Keys):
    model_config = ConfigDict(alias_generator=to_camel)


class Metadata(Kubernetes):
    name: Name
    namespace: Name | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class EmptyDir(Kubernetes):
    medium: Literal["", "Memory"] = ""
    size_limit: Quantity | None = None


class Volume(Kubernetes):
    name: Name
    empty_dir: EmptyDir


class VolumeMount(Kubernetes):
    name: Name
    mount_path: Annotated[str, Field(pattern="^/")]
    read_only: bool = False


class Resources(Kubernetes):
    limits: dict[str, int | Quantity] = {}
    requests: dict[str, int | Quantity] = {}


class Variable(Kubernetes):
    name: str
    value: str


class Container(Kubernetes):
    name: Name
    image: str
    command: list[str] = []
    args: list[str] = []
    env: list[Variable] = []
    working_dir: str | None = None
    resources: Resources = Resources()
    volume_mounts: list[VolumeMount] = []


class PodSpec(Kubernetes):
    containers: Annotated[list[Container], Field(min_length=1)]
    volumes: list[Volume] = []


class PodTemplate(Kubernetes):
    spec: PodSpec


class Replica(Kubernetes):
    replicas: Annotated[int, Field(ge=0)]
    restart_policy: Literal["Always", "OnFailure", "Never", "ExitCode"]
    template: PodTemplate


class Replicas(Keys):
    Master: Replica
    Worker: Replica


class RunPolicy(Kubernetes):
    clean_pod_policy: Literal["None", "Running", "All"]
    backoff_limit: Annotated[int, Field(ge=0)]
    active_deadline_seconds: Annotated[int, Field(ge=0)] | None = None
    ttl_seconds_after_finished: Annotated[int, Field(ge=0)] | None = None
    suspend: bool = False


class JobSpec(Kubernetes):
    nproc_per_node: Annotated[str, Field(pattern="^(auto|cpu|gpu|[1-9][0-9]*)$")]
    run_policy: RunPolicy
    pytorch_replica_specs: Replicas


class PyTorchJob(Kubernetes):
    api_version: Literal["kubeflow.org/v1"]
    kind: Literal["PyTorchJob"]
    metadata: Metadata
    spec: JobSpec


class SkyResources(Keys):
    accelerators: Annotated[str, Field(pattern="^[A-Za-z0-9-]+:[1-9][0-9]*$")]
    infra: str | None = None
    cpus: int | str | None = None
    memory: int | str | None = None
    disk_size: int | str | None = None
    use_spot: bool = False


class SkyTask(Keys):
    name: str
    num_nodes: Annotated[int, Field(ge=1)]
    workdir: str
    resources: SkyResources
    envs: dict[str, str | None] = {}
    file_mounts: dict[str, str] = {}
    setup: str
    run: str


SCHEMAS = {"pytorchjob.yaml": PyTorchJob, "skypilot.yaml": SkyTask}
WORKER = ("spec", "pytorchReplicaSpecs", "Worker")
POD = (*WORKER, "template", "spec")
CONTAINER = (*POD, "containers", 0)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_manifest_fits_its_schema(name):
    SCHEMAS[name].model_validate(load(name))


@pytest.mark.parametrize(("name", "where", "right", "wrong"), [
    ("pytorchjob.yaml", (), "apiVersion", "apiversion"),
    ("pytorchjob.yaml", ("spec",), "runPolicy", "runpolicy"),
    ("pytorchjob.yaml", ("spec",), "nprocPerNode", "nProcPerNode"),
    ("pytorchjob.yaml", ("spec", "runPolicy"), "backoffLimit", "backOffLimit"),
    ("pytorchjob.yaml", ("spec", "pytorchReplicaSpecs"), "Worker", "Workers"),
    ("pytorchjob.yaml", WORKER, "restartPolicy", "restartpolicy"),
    ("pytorchjob.yaml", POD, "volumes", "volume"),
    ("pytorchjob.yaml", CONTAINER, "volumeMounts", "volumesMounts"),
    ("pytorchjob.yaml", (*CONTAINER, "resources"), "limits", "limit"),
    ("pytorchjob.yaml", (*CONTAINER, "volumeMounts", 0), "mountPath", "mountpath"),
    ("pytorchjob.yaml", (*POD, "volumes", 0, "emptyDir"), "sizeLimit", "size"),
    ("skypilot.yaml", (), "num_nodes", "nodes"),
    ("skypilot.yaml", ("resources",), "accelerators", "accelerator"),
])  # fmt: skip
def test_a_misspelled_key_is_refused(name, where, right, wrong):
    manifest = at = copy.deepcopy(load(name))
    for key in where:
        at = at[key]
    at[wrong] = at.pop(right)
    with pytest.raises(ValidationError, match=wrong):
        SCHEMAS[name].model_validate(manifest)


@pytest.mark.parametrize(("where", "key", "value"), [
    (("spec",), "nprocPerNode", 8),
    (WORKER, "restartPolicy", "onFailure"),
    (WORKER, "replicas", "3"),
    (("spec", "runPolicy"), "cleanPodPolicy", "running"),
    (CONTAINER, "command", "torchrun train.py"),
    ((*POD, "volumes", 0, "emptyDir"), "sizeLimit", "16GB"),
    (("metadata",), "name", "Shoal"),
])  # fmt: skip
def test_a_value_that_the_operator_would_refuse_is_refused(where, key, value):
    manifest = at = copy.deepcopy(load("pytorchjob.yaml"))
    for each in where:
        at = at[each]
    at[key] = value
    with pytest.raises(ValidationError, match=key):
        PyTorchJob.model_validate(manifest)


# What they run


def test_every_replica_of_the_pytorchjob_runs_a_script_that_is_there():
    job = load("pytorchjob.yaml")
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
