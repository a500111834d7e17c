"""The launcher: hostfiles, filters, arguments, the commands for other nodes, world information."""

from __future__ import annotations

import base64
import json
import os
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

from deepspeed.launcher import multinode_runner, runner

from .case import case, raised

POOL = OrderedDict([("worker-0", 4), ("worker-1", 2), ("other", 3)])
FILES = {
    "plain": "worker-0 slots=2\nworker-1 slots=4\n",
    "blank_lines": "\nworker-0 slots=2\n\n\nworker-1 slots=1\n",
    "comments": "# hosts\nworker-0 slots=2 # fast\n#worker-9 slots=9\nworker-1 slots=3\n",
    "no_newline": "a slots=1",
    "spaces": "  worker-0   slots=2\n\tworker-1\tslots=2  \n",
    "address": "10.0.0.1 slots=8\n10.0.0.2 slots=8\n",
    "dots": "node.cluster-a.local slots=16\n",
    "twice": "worker-0 slots=2\nworker-0 slots=2\n",
    "empty": "",
    "only_comments": "# nothing\n",
    "no_slots": "worker-0\n",
    "letters": "worker-0 slots=many\n",
    "word": "worker-0 slot=2\n",
    "no_host": "slots=2\n",
    "negative": "a slots=-1\n",
    "extra": "a slots=2 max_slots=4\n",
    "equal_space": "a slots = 2\n",
}


@case(which=list(FILES))
def hostfile(which: str) -> Any:
    Path("hosts").write_text(FILES[which])
    try:
        found = runner.fetch_hostfile("hosts")
    except ValueError:
        return "ValueError"
    return None if found is None else list(found.items())


@case()
def hostfile_missing() -> Any:
    return runner.fetch_hostfile("no such file")


FILTERS = [
    ("", ""),
    ("worker-0", ""),
    ("worker-1@worker-0", ""),
    ("worker-0:1,3", ""),
    ("worker-0:0@other:1,2", ""),
    ("worker-0:1@worker-0:2", ""),
    ("", "worker-0"),
    ("", "worker-0:0,1"),
    ("", "worker-0:0,1,2,3"),
    ("", "worker-0@other"),
    ("", "worker-1:1@other:0"),
    ("", "worker-0:3@worker-0:0"),
    ("worker-0:3,1", ""),
    ("worker-0:1,1", ""),
    ("other@worker-0", ""),
    ("nobody", ""),
    ("", "nobody"),
    ("worker-1:7", ""),
    ("", "worker-1:7"),
    ("worker-0", "worker-1"),
    ("worker-0:a", ""),
    ("worker-0:", ""),
    ("@", ""),
    ("worker-0: 1", ""),
    ("worker-0:0-2", ""),
    ("", "worker-0@worker-1@other"),
    (" worker-0", ""),
]


@case(filters=FILTERS)
def resources(filters: tuple[str, str]) -> Any:
    try:
        found = runner.parse_inclusion_exclusion(POOL, *filters)
    except (ValueError, KeyError, IndexError) as error:
        return "ValueError" if isinstance(error, ValueError) else type(error).__name__
    return [[host, list(slots)] for host, slots in found.items()]


@case(filters=[("a:0,1", ""), ("", "a:1"), ("b", ""), ("", "b"), ("a@b:1", "")])
def resource_filter(filters: tuple[str, str]) -> Any:
    pool = OrderedDict([("a", [0, 1, 2]), ("b", [0, 1])])
    found = runner.parse_resource_filter(pool, include_str=filters[0], exclude_str=filters[1])
    return [[host, list(slots)] for host, slots in found.items()]


ARGUMENTS = [
    ["train.py"],
    ["train.py", "--epochs", "3"],
    ["--num_gpus", "2", "train.py", "--deepspeed"],
    ["-H", "hosts", "-i", "a:0", "train.py"],
    ["--include", "a@b", "train.py", "-x", "--y=3"],
    ["--exclude=b:1", "train.py"],
    ["--num_nodes=2", "--num_gpus=4", "--master_port", "1234", "train.py"],
    ["--master_addr", "10.0.0.1", "train.py", "--master_port", "5"],
    ["--launcher", "OpenMPI", "--launcher_args", "-x A=b --bind", "train.py"],
    ["--module", "my.train", "a"],
    ["--no_python", "run.sh", "a b"],
    ["--no_local_rank", "train.py"],
    ["--save_pid", "train.py"],
    ["--autotuning", "tune", "train.py"],
    ["--autotuning", "run", "train.py"],
    ["--enable_each_rank_log", "logs", "train.py"],
    ["--bind_cores_to_rank", "--bind_core_list", "0-3,8", "train.py"],
    ["--ssh_port", "22", "train.py"],
    ["--venv_script", "v.sh", "train.py"],
    ["--no_ssh", "--node_rank", "1", "train.py"],
    ["--no_ssh_check", "--force_multi", "train.py"],
    ["--log_level", "debug", "-q", "train.py"],
    ["train.py", "--text", "it's", 'a "b" c', "--", "-x"],
]


@case(args=ARGUMENTS)
def arguments(args: list[str]) -> Any:
    found = vars(runner.parse_args(args))
    return {
        name: found[name]
        for name in (
            "hostfile",
            "include",
            "exclude",
            "num_nodes",
            "num_gpus",
            "master_port",
            "master_addr",
            "node_rank",
            "launcher",
            "launcher_args",
            "module",
            "no_python",
            "no_local_rank",
            "no_ssh",
            "no_ssh_check",
            "force_multi",
            "save_pid",
            "enable_each_rank_log",
            "autotuning",
            "bind_cores_to_rank",
            "bind_core_list",
            "ssh_port",
            "venv_script",
            "log_level",
            "quiet",
            "user_script",
            "user_args",
        )
    }


@case(
    args=[
        [],
        ["--no_such", "train.py"],
        ["--num_gpus", "many", "train.py"],
        ["--autotuning", "perhaps", "train.py"],
        ["--log_level", "loud", "train.py"],
    ]
)
def arguments_refused(args: list[str]) -> Any:
    return raised(lambda: runner.parse_args(args))


@case()
def world_information() -> Any:
    text = runner.encode_world_info({"a": [0, 1], "b": [2]})
    return [text, json.loads(base64.urlsafe_b64decode(text))]


def namespace(*args: str) -> Namespace:
    found = runner.parse_args(list(args))
    found.master_addr = found.master_addr or "10.0.0.1"
    return found


QUOTED = [
    "train.py",
    "--text",
    "it's here",
    "--json",
    '{"a": [1, 2]}',
    "--plain=3",
    "--empty",
    "",
    "$HOME",
    "a;b",
    "--deepspeed",
]


@case(
    args=[
        ["train.py"],
        QUOTED,
        ["--module", "pkg.train", "x"],
        ["--no_python", "./run", "x"],
        ["--no_local_rank", "train.py"],
        ["--launcher_args", "-x -y", "train.py"],
        ["--ssh_port", "222", "train.py"],
        ["--venv_script", "/v.sh", "train.py"],
    ]
)
def pdsh_command(args: list[str]) -> Any:
    world = runner.encode_world_info(OrderedDict([("a", [0, 1]), ("b", [0, 1])]))
    held = multinode_runner.PDSHRunner(namespace(*args), world)
    held.add_export("NCCL_DEBUG", "INFO")
    held.add_export("QUOTED", "it's 1")
    environment = dict(os.environ)
    command = held.get_cmd(environment, OrderedDict([("a", [0, 1]), ("b", [0, 1])]))
    words = command[0] if isinstance(command, tuple) else command
    return [held.name, environment.get("PDSH_RCMD_TYPE"), *[normal(word) for word in words]]


def normal(word: str) -> str:
    import sys

    if word.endswith("launcher_helper.py"):
        return "helper"
    return word.replace(sys.executable, "python").replace(os.path.abspath("."), "here")


@case(
    kind=["OpenMPIRunner", "MPICHRunner", "IMPIRunner", "SlurmRunner"],
    args=[
        ["train.py"],
        QUOTED[:8],
        ["--module", "m", "x"],
        ["--no_python", "run"],
        ["--launcher_args", "-a -b c", "train.py"],
    ],
)
def mpi_command(kind: str, args: list[str]) -> Any:
    pool = OrderedDict([("a", 2), ("b", 2)])
    world = runner.encode_world_info({host: list(range(slots)) for host, slots in pool.items()})
    one = namespace("--launcher", kind.removesuffix("Runner"), *args)
    held = getattr(multinode_runner, kind)(one, world, pool)
    held.add_export("NCCL_DEBUG", "INFO")
    command = held.get_cmd({"PATH": "/bin"}, OrderedDict([("a", [0, 1]), ("b", [0, 1])]))
    return [held.name, *[normal(word) for word in command]]


@case(
    kind=["OpenMPIRunner", "MPICHRunner", "IMPIRunner", "SlurmRunner", "PDSHRunner"],
    args=[
        ["-i", "a", "train.py"],
        ["-e", "b:1", "train.py"],
        ["--num_nodes", "1", "train.py"],
        ["--num_gpus", "1", "train.py"],
        ["train.py"],
    ],
)
def mpi_arguments(kind: str, args: list[str]) -> Any:
    pool = OrderedDict([("a", 2), ("b", 2)])
    world = runner.encode_world_info({"a": [0, 1], "b": [0, 1]})
    one = namespace(*args)

    def check() -> None:
        held = (
            multinode_runner.PDSHRunner(one, world)
            if kind == "PDSHRunner"
            else getattr(multinode_runner, kind)(one, world, pool)
        )
        held.validate_args()

    return raised(check)


@case(kind=["OpenMPIRunner", "MPICHRunner"])
def unequal_slots(kind: str) -> Any:
    pool = OrderedDict([("a", 2), ("b", 3)])
    held = getattr(multinode_runner, kind)(
        namespace("train.py"), runner.encode_world_info({"a": [0, 1], "b": [0, 1, 2]}), pool
    )
    return raised(lambda: held.get_cmd({}, OrderedDict([("a", [0, 1]), ("b", [0, 1, 2])])))


@case(
    args=[["train.py", "a"], ["--module", "train", "a"], ["--no_python", "train", "a"]],
    text=["plain", "it's", 'say "x"', "a b", "$x;`y`"],
)
def user_arguments(args: list[str], text: str) -> Any:
    world = runner.encode_world_info({"a": [0]})
    held = multinode_runner.PDSHRunner(namespace(*args, text), world)
    return [held.user_arguments, held.user_script]


@case(
    args=[
        ["--include", "a", "--exclude", "b", "train.py"],
        ["-H", "hosts", "--num_nodes", "1", "-i", "a", "train.py"],
        ["-H", "hosts", "--num_gpus", "1", "-e", "a", "train.py"],
        ["--num_nodes", "2", "train.py"],
    ]
)
def main_refuses(args: list[str]) -> Any:
    Path("hosts").write_text(FILES["plain"])
    return raised(lambda: runner.main(args))


@case(given=[{"a": [0], "b": [0, 1]}, {}])
def constants(given: dict[str, Any]) -> Any:
    return [
        runner.DEEPSPEED_ENVIRONMENT_NAME,
        runner.DLTS_HOSTFILE,
        runner.PDSH_MAX_FAN_OUT,
        sorted(runner.DEEPSPEED_ENVIRONMENT_PATHS)[:1],
        runner.encode_world_info(given),
    ]


@case(text=["0-3", "0,2,4", "0-1,4-5", "3", "5-4", "a-b", "0-2,1", "0-2,2-3"])
def core_lists(text: str) -> Any:
    from deepspeed.utils.numa import parse_range_list

    try:
        return list(parse_range_list(text))
    except ValueError:
        return "ValueError"
