"""`deepspeed.launcher`: hostfiles, filters, the command lines of back ends, and a real job on this machine."""

from __future__ import annotations

import base64
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.compat import ranks_command
from shoal.compat.deepspeed.launcher import launch, launcher_helper, multinode_runner, runner
from shoal.errors import NotSupportedYet
from shoal.launch import cli
from shoal.log import logger

HOSTS = OrderedDict([("w0", [0, 1, 2, 3]), ("w1", [0, 1])])


@pytest.mark.parametrize(("include", "exclude", "left"), [
    ("", "", {"w0": [0, 1, 2, 3], "w1": [0, 1]}),
    ("w1", "", {"w1": [0, 1]}),
    ("w1:1@w0:2,0", "", {"w0": [0, 2], "w1": [1]}),
    ("w0:1@w0:1", "", {"w0": [1]}),
    ("", "w1", {"w0": [0, 1, 2, 3]}),
    ("", "w0:0,1", {"w0": [2, 3], "w1": [0, 1]}),
    ("", "w1:0,1", {"w0": [0, 1, 2, 3]}),
])  # fmt: skip
def test_filters_leave_slots_in_the_order_of_the_hosts(include: str, exclude: str, left: dict[str, list[int]]) -> None:
    found = runner.parse_resource_filter(HOSTS, include_str=include, exclude_str=exclude)
    assert list(found.items()) == list(left.items())


@pytest.mark.parametrize(("include", "exclude", "message"), [
    ("w0", "w1", "mutually exclusive"),
    ("w9", "", "Hostname 'w9' not found"),
    ("", "w9", "Hostname 'w9' not found"),
    ("w0:9", "", "No slot '9' specified on host 'w0'"),
    ("", "w0:9", "No slot '9' specified on host 'w0'"),
    ("w0:0-2", "", "invalid literal"),
])  # fmt: skip
def test_a_wrong_filter_says_what_is_wrong(include: str, exclude: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runner.parse_resource_filter(HOSTS, include, exclude)


def test_a_hostfile_gives_the_slots_of_each_host(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\n# none\n\nb slots=3  # more\n")
    assert runner.fetch_hostfile(str(tmp_path / "hosts")) == OrderedDict(a=2, b=3)
    assert runner.fetch_hostfile(str(tmp_path / "missing")) is None


@pytest.mark.parametrize(("text", "message"), [
    ("a slots=2\na slots=3", "multiple entries for a"),
    ("a slots=x", "bad entry: a slots=x"),
    ("a", "bad entry: a"),
    ("# none", "empty"),
])  # fmt: skip
def test_a_wrong_hostfile_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ValueError, match=message):
        runner.fetch_hostfile(str(tmp_path / "hosts"))


def test_counts_of_nodes_and_gpus_cut_the_resources() -> None:
    both = OrderedDict(h1=[0, 1], h2=[0, 1])
    assert runner.apply_num_nodes_and_gpus(both, 1, -1) == {"h1": [0, 1]}
    assert runner.apply_num_nodes_and_gpus(both, -1, 1) == {"h1": [0], "h2": [0]}
    assert runner.apply_num_nodes_and_gpus(both, -1, 3) == {"h1": [0, 1, 2], "h2": [0, 1, 2]}
    assert runner.parse_inclusion_exclusion({"h1": 2, "h2": 2}, "h2", "") == {"h2": [0, 1]}


def test_world_info_is_json_in_urlsafe_base64() -> None:
    word = runner.encode_world_info({"localhost": [0, 1]})
    assert json.loads(base64.urlsafe_b64decode(word)) == {"localhost": [0, 1]}


# The command line


@pytest.mark.parametrize(("words", "kind", "message"), [
    ("--include localhost:0 --num_gpus 1 train.py", ValueError, "Cannot specify num_nodes/gpus"),
    ("--num_nodes 2 --num_gpus 1 train.py", ValueError, "no extra nodes available"),
    ("--num_gpus 1 --no_python --module train.py", ValueError, "both a module and a program"),
    ("--num_gpus 1 --no_ssh train.py", AssertionError, "--node_rank: got -1"),
    ("--num_gpus 1 --force_multi --launcher bogus train.py", NotImplementedError, "Unknown launcher bogus"),
    ("--num_gpus 1 --elastic_training --no_local_rank train.py", ValueError, "drop --no_local_rank"),
    ("--num_gpus 1 --elastic_training --min_elastic_nodes 2 train.py", ValueError, "got 2 and 1 with 1 nodes"),
    ("--num_gpus 1 --autotuning tune train.py", NotSupportedYet, "autotuning"),
    ("--num_gpus 1 --force_multi --launcher openmpi train.py", ValueError, "does not support limiting"),
    ("--num_gpus 1 --bind_cores_to_rank --bind_core_list x train.py", ValueError, "--bind_core_list: got 'x'"),
])  # fmt: skip
def test_a_wrong_command_line_starts_nothing(words: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        runner.main(words.split())


def command_of(monkeypatch: pytest.MonkeyPatch, words: str) -> tuple[list[str], dict[str, object]]:
    """Return the command that `deepspeed` would run, and its resources."""
    made: list[tuple[list[str], dict[str, object]]] = []

    def keep(command: list[str], **options: object) -> int:
        made.append((command, options))
        return 0

    monkeypatch.setattr(ranks_command, "run", keep)
    runner.main(words.split())
    ((command, options),) = made
    assert command[:4] == [sys.executable, "-m", "shoal", "run"]
    return command[4:], options


def test_options_become_those_of_shoal_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found, options = command_of(monkeypatch, "--num_gpus 2 train.py --deepspeed --x 1")
    assert found == ["--ranks", "2", "--as-deepspeed", "--local-rank-argument", "--no-bind-cores", "train.py", "--deepspeed",
                     "--x", "1"]
    assert options["devices"] == [0, 1]
    found, _ = command_of(monkeypatch, "--num_gpus 1 --master_port 12345 --module --no_local_rank "
                                             "--bind_cores_to_rank --bind_core_list 0-1,3 --enable_each_rank_log logs "
                                             "package.train")
    assert found == ["--ranks", "1", "--port", "12345", "--module", "--as-deepspeed", "--core-list", "0-1,3", "--log-dir",
                     "logs", "package.train"]
    found, _ = command_of(monkeypatch, "--num_gpus 1 --no_python program")
    assert found == ["--ranks", "1", "--no-python", "--local-rank-argument", "--no-bind-cores", "program"]


def test_visible_devices_are_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    found, options = command_of(monkeypatch, "train.py")
    assert (found[:2], options["devices"]) == (["--ranks", "2"], [3, 1])


@pytest.mark.parametrize("visible", ["GPU-8932f937,GPU-1", "MIG-8932f937, MIG-GPU-1/1/0", "0,GPU-1"])
def test_devices_that_have_names_stay_visible_as_they_are(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found, options = command_of(monkeypatch, "train.py")
    assert (found[:2], options["devices"]) == (["--ranks", "2"], None)
    with pytest.raises(ValueError, match=r"^--force_multi: CUDA_VISIBLE_DEVICES=.*GPU-1.* names devices, and hosts get"):
        runner.main(["--force_multi", "train.py"])


@pytest.mark.parametrize(("words", "option"), [("-i localhost:0", "--include or --exclude"), ("--num_gpus 1", "--num_gpus")])
def test_an_option_that_selects_devices_says_so(monkeypatch, caplog, words: str, option: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    _, options = command_of(monkeypatch, f"{words} train.py")
    assert options["devices"] == [0]
    assert f"CUDA_VISIBLE_DEVICES=3 is ignored: {option} selects the devices" in caplog.text


@pytest.mark.parametrize(("words", "needs"), [
    ("--bind_core_list 0", "--bind_cores_to_rank"), ("--max_elastic_nodes 1", "--elastic_training"),
    ("--venv_script v", "hosts that this command starts"), ("--bind_core_list 0 --bind_cores_to_rank", None),
])  # fmt: skip
def test_an_option_without_effect_is_named(monkeypatch, caplog, words: str, needs: str | None) -> None:
    command_of(monkeypatch, f"--num_gpus 1 {words} train.py")
    warned = [text for text in caplog.messages if "has no effect" in text]
    assert warned == ([] if needs is None else [f"{words.split()[0]}: has no effect without {needs}"])


@pytest.mark.parametrize(("words", "warns"), [
    ("-i 192.0.2.1", True), ("-i 192.0.2.1 --force_multi", False), ("-i 192.0.2.1 --no_ssh --node_rank 0", False),
    ("-i 127.0.0.1", False), ("-i nope.invalid", False), (f"-i {socket.gethostname()}", False),
])  # fmt: skip
def test_a_job_whose_only_host_is_another_machine_warns(
        monkeypatch, caplog, tmp_path: Path, words: str, warns: bool) -> None:
    hosts = ("192.0.2.1", "127.0.0.1", "nope.invalid", socket.gethostname())
    (tmp_path / "hosts").write_text("".join(f"{host} slots=1\n" for host in hosts))
    found, _ = command_of(monkeypatch, f"-H {tmp_path}/hosts --launcher pdsh {words} train.py")
    assert ("192.0.2.1 is the only host of this job, and another machine: the ranks start on this one all the same, as "
            "published. Give --force_multi to start them on 192.0.2.1" in caplog.messages) is warns
    assert ("--hosts" in found) is ("--force_multi" in words)


@pytest.mark.parametrize(("words", "warns"), [
    ("", True), ("--log_level warning", True), ("--log_level error", False), ("-q", False)])
def test_a_quiet_command_does_not_warn(monkeypatch, capsys, words: str, warns: bool) -> None:
    level = logger.level
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(sys.stderr)])
    command_of(monkeypatch, f"{words} --num_gpus 1 train.py")
    assert ("no hostfile /job/hostfile" in capsys.readouterr().err) is warns
    assert logger.level == level


def test_each_node_is_started_by_hand_with_no_ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=3\n")
    found, options = command_of(monkeypatch, f"-H {tmp_path}/hosts --no_ssh --node_rank 1 --master_addr a train.py")
    assert found[:8] == ["--ranks", "3", "--nodes", "2", "--rendezvous", "a:29500", "--node-rank", "1"]
    assert (options["node"], options["nodes"]) == (1, 2)
    found, _ = command_of(monkeypatch, f"-H {tmp_path}/hosts --no_ssh --node_rank 0 --master_addr a --elastic_training "
                                       "--min_elastic_nodes 1 train.py")
    assert found[:6] == ["--ranks", "2", "--max-restarts", "100", "--nodes", "1:2"]
    found, _ = command_of(monkeypatch, "--num_gpus 1 --elastic_training --master_port 29511 train.py")
    assert found[:6] == ["--ranks", "1", "--max-restarts", "100", "--port", "29511"]


def test_the_address_of_the_first_node_is_looked_up(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    for name, text in (("ssh", 'echo "$@" >&2; echo "fe80::1 10.0.0.7 10.0.0.8"'), ("hostname", "echo 10.0.0.7")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} \"$@\" > {tmp_path}/asked\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    words = f"-H {tmp_path}/hosts --no_ssh --master_port 1 --ssh_port 22 --node_rank"
    found, _ = command_of(monkeypatch, f"{words} 1 train.py")
    assert found[4:6] == ["--rendezvous", "10.0.0.7:1"]
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("ssh -T -o BatchMode=yes ") and asked.endswith(" -p 22 a hostname -I\n")
    assert "--ssh_port: has no effect" not in capsys.readouterr().err
    found, _ = command_of(monkeypatch, f"{words} 0 train.py")
    assert found[4:6] == ["--rendezvous", "10.0.0.7:1"]
    assert (tmp_path / "asked").read_text() == "hostname -I\n"
    (tmp_path / "ssh").write_text("#!/bin/sh\necho 'ssh: Could not resolve hostname a' >&2; exit 255\n")
    with pytest.raises(RuntimeError, match=r"address of a, the first host, .* ssh: Could not resolve .* --master_addr"):
        command_of(monkeypatch, f"{words} 1 train.py")


@pytest.mark.parametrize(("nodes", "given"), [
    ("", ["--nodes", "1:3"]), ("--min_elastic_nodes 2", ["--nodes", "2:3"]), ("--min_elastic_nodes 3", []),
    ("--min_elastic_nodes 2 --max_elastic_nodes 2", ["--nodes", "2"]),
])  # fmt: skip
def test_an_elastic_job_goes_on_with_fewer_hosts(monkeypatch, tmp_path: Path, nodes: str, given: list[str]) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\nc slots=1\n")
    words = f"-H {tmp_path}/hosts --elastic_training {nodes} train.py"
    found, _ = command_of(monkeypatch, words)
    before = ["--max-restarts", "100", "--hosts", "a:0@b:0@c:0", "--launcher", "pdsh"]
    assert found[:len(before) + len(given)] == [*before, *given]
    assert ("--nodes" in found) is bool(given)
    (tmp_path / "pdsh").write_text("#!/bin/sh\n")
    (tmp_path / "pdsh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(ranks_command, "run", lambda words, **options: cli.main([*words[3:4], "--dry-run", *words[4:]]))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # which it exports
    runner.main([*words.split()[:-1], __file__])  # `shoal run` takes it


def test_a_launcher_that_ends_all_hosts_refuses_a_range(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    words = f"-H {tmp_path}/hosts --elastic_training --launcher openmpi {{}} train.py"
    with pytest.raises(NotSupportedYet, match=r"where one is lost; use --launcher pdsh, or give --min_elastic_nodes 2"):
        runner.main(words.format("").split())
    found, _ = command_of(monkeypatch, words.format("--min_elastic_nodes 2"))
    assert found[:6] == ["--max-restarts", "100", "--hosts", "a:0@b:0", "--launcher", "openmpi"]


def test_several_hosts_are_those_of_shoal_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=3\n")
    monkeypatch.setenv("NCCL_X", "a 'b\n$c")
    found, options = command_of(monkeypatch, f"-H {tmp_path}/hosts --exclude b:0 --launcher PDSH --ssh_port 22 "
                                             "--venv_script v --master_port 1 --launcher_args=-u train.py --x")
    assert found[:9] == ["--hosts", "a:0,1@b:1,2", "--launcher", "pdsh", "--rendezvous", ":1", "--launcher-args=-u",
                         "--ssh-port=22", "--setup=v"]
    assert "--export=NCCL_X" in found and found[-2:] == ["train.py", "--x"]
    assert options["variables"]["NCCL_X"] == "a 'b\n$c"  # pyright: ignore[reportIndexIssue]


# Back ends

TWO = OrderedDict(h1=[0, 1], h2=[0, 1])
SCRIPT = [sys.executable, "-u", "train.py", "--a", "b c"]
SHARED = ["-genv", "FOO", '"bar baz"', "-genv", "MASTER_ADDR", "m1", "-genv", "MASTER_PORT", "1234",
          "-genv", "WORLD_SIZE", "4", "-genv", "LOCAL_SIZE", "2"]
COMMANDS = {
    "openmpi": ["mpirun", "-n", "4", "-hostfile", "hf", "--mca", "btl", "^openib", "--mca", "btl_tcp_if_include", "eth0",
                "-x", "UCX_TLS=tcp", "-x", 'FOO="bar baz"', *SCRIPT],
    "mpich": ["mpirun", "-n", "4", "-ppn", "2", "-genv", 'FOO="bar baz"', *SHARED[3:], "-hosts", "h1,h2", sys.executable,
              "-u", launcher_helper.__file__, "--launcher", "mpich", "train.py", "--a", "b c"],
    "impi": ["mpirun", "-ppn", "2", *SHARED, "-genv", "I_MPI_PIN", "0", "-hosts", "h1,h2",
             *[word for rank in range(4) for word in (*([":"] if rank else []), "-n", "1", "-env", "RANK", str(rank),
                                                      "-env", "LOCAL_RANK", str(rank % 2), *SCRIPT)]],
    "slurm": ["srun", "-n", "4", '--export=ALL,FOO="bar baz"', *SCRIPT],
    "mvapich": ["mpirun", "-np", "4", "-ppn", "2", "--hostfile", "/tmp/deepspeed_mvapich_hostfile",
                "-env", "MV2_SMP_USE_CMA=0", "-env", "MV2_DEBUG_SHOW_BACKTRACE=1", "-env", "MV2_SUPPORT_DL=1",
                "-env", "MV2_ENABLE_AFFINITY=0", "-env",
                "MV2_INTER_ALLGATHER_TUNING=5", "-env", "MV2_CUDA_USE_NAIVE=0", "-env", 'FOO="bar baz"', *SCRIPT],
}
"""The command lines of DeepSpeed 0.19.8 for two nodes of two slots."""


def back_end(name: str, *options: str, pool: Mapping[str, Any] = TWO) -> multinode_runner.MultiNodeRunner:
    args = runner.parse_args(["--hostfile", "hf", "--master_addr", "m1", "--master_port", "1234", "--launcher", name,
                              *options, "train.py", "--a", "b c"])
    made = multinode_runner.make_runner(args, "WORLD", pool)
    made.add_export("FOO", "bar baz")
    return made


@pytest.mark.parametrize("name", COMMANDS)
def test_back_ends_have_the_published_command_lines(name: str) -> None:
    made = back_end(name.upper())
    assert (made.name, made.get_cmd({}, TWO)) == (name, COMMANDS[name])


def test_pdsh_starts_one_launcher_on_each_host() -> None:
    environment: dict[str, str] = {}
    words, end, same = back_end("pdsh", "--module", "--ssh_port", "22").get_cmd(environment, TWO)
    assert words[:6] == ["pdsh", "-S", "-f", "1024", "-w", "h1,h2"]
    assert words[6:8] == ['export FOO="bar baz"; ', f"cd {os.getcwd()};"]
    assert words[8:] == [sys.executable, "-u", "-m", "deepspeed.launcher.launch", "--world_info=WORLD", "--node_rank=%n",
                         "--master_addr=m1", "--master_port=1234", "--module", "--enable_each_rank_log=None", "train.py",
                         "--a", '"b c"']
    assert end[6] == "pkill -f " and same is environment
    assert environment == {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": "-p 22"}


@pytest.mark.parametrize("name", ["openmpi", "mpich", "impi", "mvapich"])
def test_back_ends_of_mpi_refuse_what_they_cannot_honour(name: str) -> None:
    with pytest.raises(ValueError, match="does not support worker include/exclusion"):
        back_end(name, "--include", "h1")
    with pytest.raises(ValueError, match="does not support limiting"):
        back_end(name, "--num_gpus", "1")
    if name != "openmpi":
        with pytest.raises(ValueError, match=r"same number of devices per node; got \[1, 2\]"):
            back_end(name, pool=OrderedDict(h1=[0, 1], h2=[0])).get_cmd({}, TWO)


@pytest.mark.parametrize("name", ["openmpi", "mpich", "impi", "mvapich"])
def test_back_ends_of_mpi_take_the_numbers_of_a_hostfile(name: str) -> None:
    pool = OrderedDict(h1=2, h2=2)
    assert back_end(name, pool=pool).get_cmd({}, pool) == COMMANDS[name]


def test_slurm_names_the_nodes_that_a_filter_leaves() -> None:
    assert back_end("slurm", "--exclude", "h3").get_cmd({}, TWO)[3:7] == ["--nodelist", "h1,h2", "--nodes", "2"]
    with pytest.raises(ValueError, match="same slot count on every host"):
        back_end("slurm").get_cmd({}, OrderedDict(h1=[0, 1], h2=[0]))


def test_the_command_line_names_its_back_ends() -> None:
    assert runner.LAUNCHER_CLASSES["openmpi"] is runner.OpenMPIRunner and len(runner.LAUNCHER_CLASSES) == 6


def test_variables_that_a_cluster_sets_for_a_node_stay_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5")
    for mark in (False, True):
        if mark:
            monkeypatch.setenv("AISC_JOB_NAME", "a")
        found = ranks_command.exports(runner.EXPORT_ENVS, [str(tmp_path)], ".deepspeed_env", runner.EXCLUDE_ENVS)
        assert ("NCCL_IB_HCA" in found) is not mark


def test_variables_for_other_nodes_come_from_names_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    (tmp_path / ".deepspeed_env").write_bytes(b"A=1=2\nB=\xff\x0c\xe2\x80\xa8c\n")
    found = ranks_command.exports(runner.EXPORT_ENVS, [str(tmp_path)], ".deepspeed_env", {})
    assert (found["NCCL_DEBUG"], found["A"], found["PYTHONPATH"].split(":")[0]) == ("INFO", "1=2", os.getcwd())
    assert os.fsencode(found["B"]) == b"\xff\x0c\xe2\x80\xa8c", "a value arrives byte for byte"
    (tmp_path / ".deepspeed_env").write_text("\n")
    with pytest.raises(ValueError, match="write NAME=VALUE"):
        ranks_command.exports(runner.EXPORT_ENVS, [str(tmp_path)], ".deepspeed_env", {})


def test_the_helper_of_mpich_translates_ranks() -> None:
    assert launcher_helper.env_mapping({"PMI_RANK": "3", "MPI_LOCALRANKID": "1"})["LOCAL_RANK"] == "1"
    with pytest.raises(OSError, match=r"RANK: expected one value in PMIX_RANK, PMI_RANK, got none"):
        launcher_helper.env_mapping({})


# A real job


def test_a_job_on_this_machine_has_the_published_environment(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import argparse, json, os, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
import deepspeed
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
names = ("MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "CUDA_VISIBLE_DEVICES")
folder = os.path.dirname(__file__)
with open(f"{folder}/{args.local_rank}.part", "w") as file:
    json.dump([{name: os.environ[name] for name in names}, args.deepspeed, args.deepspeed_config], file)
os.rename(f"{folder}/{args.local_rank}.part", f"{folder}/{args.local_rank}.json")
while os.environ["RANK"] == "1" and not os.path.exists(f"{folder}/0.json"):
    time.sleep(0.01)  # the other rank is stopped as soon as this one fails
sys.exit(5 if os.environ["RANK"] == "1" else 0)
""")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    command = [sys.executable, "-m", "shoal.compat.deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", port,
               str(script), "--deepspeed", "--deepspeed_config", "x.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 5, done.stderr
    for rank in range(2):
        variables, enabled, config = json.loads((tmp_path / f"{rank}.json").read_text())
        assert variables == {"MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
                             "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
        assert (enabled, config) == (True, "x.json")


def test_a_ctrl_c_at_the_terminal_comes_to_the_ranks_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import os, signal, time
def finish(number, frame):
    time.sleep(0.5)
    os.write(1, b"saved\\n")
    raise SystemExit(0)
signal.signal(signal.SIGINT, finish)
os.write(1, b"ready\\n")
while True: signal.pause()
""")
    command = [sys.executable, "-m", "shoal.compat.deepspeed.launcher.runner", "--num_gpus", "1", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does: every process of its foreground group gets it
        out, err = job.communicate(timeout=120)
    assert (job.returncode, out) == (128 + signal.SIGINT, "saved\n"), err


def test_the_launcher_of_one_node_runs_the_slots_of_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(ranks_command, "run", lambda words, **options: made.append(words) or 0)
    world = runner.encode_world_info({"h1": [0], "h2": [0, 1]})
    launch.main([f"--world_info={world}", "--node_rank=1", "--master_addr=h1", "--master_port=1234", "train.py", "--a"])
    assert made[0][4:12] == ["--ranks", "2", "--nodes", "2", "--rendezvous", "h1:1234", "--node-rank", "1"]
    with pytest.raises(AssertionError, match="must provide world info dict"):
        launch.main(["train.py"])
