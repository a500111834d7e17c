"""`deepspeed.launcher.runner`: the command `deepspeed`, which is a command line of `shoal run`, on one machine or several.

Hostfiles, filters and options are those that are published. The launchers are Shoal's own, under the published names.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.cluster import hostfile
from shoal.cluster.hostfile import Host
from shoal.cluster.launchers import LAUNCHERS
from shoal.compat import ranks_command
from shoal.compat.deepspeed.launcher import multinode_runner
from shoal.compat.deepspeed.launcher.constants import (
    IMPI_LAUNCHER,
    MPICH_LAUNCHER,
    MVAPICH_LAUNCHER,
    OPENMPI_LAUNCHER,
    PDSH_LAUNCHER,
    PDSH_MAX_FAN_OUT,
    SLURM_LAUNCHER,
    TORCH_DISTRIBUTED_DEFAULT_PORT,
)
from shoal.compat.deepspeed.launcher.multinode_runner import (
    LAUNCHER_CLASSES,
    IMPIRunner,
    MPICHRunner,
    MVAPICHRunner,
    OpenMPIRunner,
    PDSHRunner,
    SlurmRunner,
)
from shoal.compat.deepspeed.utils.logging import get_log_level_from_string, log_levels
from shoal.errors import NotSupportedYet, ShoalError
from shoal.log import logger

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "DLTS_HOSTFILE", "EXCLUDE_ENVS", "EXPORT_ENVS", "IMPI_LAUNCHER",
           "LAUNCHER_CLASSES", "MPICH_LAUNCHER", "MVAPICH_LAUNCHER", "OPENMPI_LAUNCHER", "PDSH_LAUNCHER", "PDSH_MAX_FAN_OUT",
           "SLURM_LAUNCHER", "TORCH_DISTRIBUTED_DEFAULT_PORT", "IMPIRunner", "MPICHRunner", "MVAPICHRunner",
           "OpenMPIRunner", "PDSHRunner", "SlurmRunner", "apply_num_nodes_and_gpus", "command", "encode_world_info",
           "fetch_hostfile", "main", "parse_args", "parse_inclusion_exclusion", "parse_node_config",
           "parse_node_config_list", "parse_resource_filter"]

DLTS_HOSTFILE = "/job/hostfile"
RESTARTS = 100
"""How often an elastic job restarts, as published."""
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX", "NCCL"]
EXCLUDE_ENVS = {"AISC_JOB_NAME": ["NCCL_IB_HCA", "UCX_NET_DEVICES"]}
"""Variables that other nodes do not get, by the variable that must be set for that."""
DEEPSPEED_ENVIRONMENT_NAME = ranks_command.exports_file()
"""The file of variables for other nodes; accelerate writes its own into it."""
DEEPSPEED_ENVIRONMENT_PATHS = [str(Path.home()), "."]
LOCALHOST = "localhost"

Resources = OrderedDict[str, list[int]]


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line of `deepspeed`."""
    parser = argparse.ArgumentParser(prog="deepspeed", formatter_class=argparse.ArgumentDefaultsHelpFormatter,
                                     description="Start a training script on the ranks of one or more nodes.")
    add = parser.add_argument
    add("-H", "--hostfile", default=DLTS_HOSTFILE, help="lines of `NAME slots=N`; without such a file: this machine")
    add("-i", "--include", default="", help="resources to use: NAME[:SLOT[,SLOT...]] joined by @")
    add("-e", "--exclude", default="", help="resources not to use, in the same form")
    add("--num_nodes", type=int, default=-1, help="use the first N hosts")
    add("--min_elastic_nodes", type=int, default=-1, help="fewest nodes of elastic training")
    add("--max_elastic_nodes", type=int, default=-1, help="most nodes of elastic training")
    add("--num_gpus", "--num_accelerators", type=int, default=-1, help="use slots 0 to N-1 of each host")
    add("--master_port", type=int, default=TORCH_DISTRIBUTED_DEFAULT_PORT, help="port of rank 0's store")
    add("--master_addr", default="", help="address of rank 0's node")
    add("--node_rank", type=int, default=-1, help="the number of this node, with --no_ssh")
    add("--launcher", default=PDSH_LAUNCHER, help="multi-node back end: pdsh, openmpi, mpich, mvapich, slurm, impi")
    add("--launcher_args", default="", help="options for the back end, as one word")
    add("--module", action="store_true", help="run the script as `python -m`")
    add("--no_python", action="store_true", help="execute the script itself, without python")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    add("--no_ssh", action="store_true", help="this command is started on each node by hand, with --node_rank")
    add("--no_ssh_check", action="store_true", help="accepted: there is no test of connections but the start")
    add("--force_multi", action="store_true", help="use the multi-node back end for one node too")
    add("--save_pid", action="store_true", help="write the process id of the launcher to /tmp/PID.deepspeed")
    add("--enable_each_rank_log", default="None", metavar="DIR", help="write the output of each rank to files in DIR")
    add("--autotuning", default="", choices=["", "tune", "run"], help="search for a configuration")
    add("--elastic_training", action="store_true", help="restart on another number of nodes")
    add("--bind_cores_to_rank", action="store_true", help="bind each rank to its share of the cores")
    add("--bind_core_list", default=None, help="the cores to share, such as 0-7,16")
    add("--ssh_port", type=int, default=None, help="port of ssh")
    add("--venv_script", default=None, help="script that each node sources first")
    add("--log_level", default="info", choices=list(log_levels), help="least level of this command's own messages; ranks "
        "and `shoal run`, which report failures, are not affected")
    add("-q", "--quiet", action="store_true", help="--log_level error")
    add("user_script", help="the script, module or program")
    add("user_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(args)


# Resources


def fetch_hostfile(hostfile_path: str) -> OrderedDict[str, int] | None:
    """Return the slots of each host of a hostfile, in its order; None, with a warning, where there is no file."""
    if not Path(hostfile_path).is_file():
        logger.warning("no hostfile %s: the job runs on this machine alone", hostfile_path)
        return None
    return OrderedDict((host.name, len(host.slots)) for host in hostfile.read(Path(hostfile_path)))


def _parse_hostfile(  # pyright: ignore[reportUnusedFunction]  a published name
        hostfile_lines: Sequence[str]) -> OrderedDict[str, int]:
    """Return the slots of each host. Raises ValueError for a line of another form, a repeated host, and no host."""
    return OrderedDict((host.name, len(host.slots)) for host in hostfile.parse_lines(hostfile_lines))


def _stable_remove_duplicates(  # pyright: ignore[reportUnusedFunction]  a published name
        data: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(data))


def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """Return the host of `NAME[:SLOT[,SLOT...]]` and its slots; none stands for all."""
    ((host, slots),) = hostfile.parse_filter(node_config).items()
    return host, list(slots)


def parse_node_config_list(node_config_list: Sequence[str]) -> dict[str, list[int]]:
    """Return the slots of each host of a list of such words."""
    return dict(parse_node_config(each) for each in node_config_list)


def parse_resource_filter(host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = "") -> Resources:
    """Return the slots of each host that a filter leaves, in the order of `host_info`.

    A filter is `NAME[:SLOT[,SLOT...]]` joined by `@`. Raises ValueError for both filters at once, and for a host or a slot
    that does not exist.
    """
    if include_str and exclude_str:
        raise ValueError("include_str and exclude_str are mutually exclusive.")
    hosts = [Host(name=name, slots=tuple(slots)) for name, slots in host_info.items()]
    if include_str:
        hosts = hostfile.included(hosts, include_str)
    elif exclude_str:
        hosts = hostfile.excluded(hosts, exclude_str)
    return OrderedDict((host.name, list(host.slots)) for host in hosts)


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> Resources:
    """Return the slots of each host of a hostfile that the filters leave."""
    return parse_resource_filter({host: range(slots) for host, slots in resource_pool.items()}, inclusion, exclusion)


def apply_num_nodes_and_gpus(active_resources: Mapping[str, Sequence[int]], num_nodes: int, num_gpus: int) -> Resources:
    """Return the first `num_nodes` hosts, each with slots 0 to `num_gpus` - 1; a count below 1 changes nothing."""
    hosts = list(active_resources)[:num_nodes if num_nodes > 0 else None]
    return OrderedDict((host, list(range(num_gpus) if num_gpus > 0 else active_resources[host])) for host in hosts)


def encode_world_info(world_info: Mapping[str, int | Sequence[int]]) -> str:
    """Return the slots of each host, or their number, as one word: JSON in urlsafe base64."""
    words = {host: slots if isinstance(slots, int) else list(slots) for host, slots in world_info.items()}
    return base64.urlsafe_b64encode(json.dumps(words).encode()).decode()


def run_autotuning(args: argparse.Namespace, active_resources: Mapping[str, Sequence[int]]) -> None:
    """Raise `NotSupportedYet`."""
    raise NotSupportedYet("--autotuning: is not supported yet; `shoal config show` prices a configuration")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResources:
    """The slots of each host that a job uses."""

    active: Resources
    several: bool
    """Whether the multi-node back end is to start them."""
    named: bool
    """Whether CUDA_VISIBLE_DEVICES has the names of this machine's devices: slots then count its entries."""


def job_resources(options: argparse.Namespace) -> JobResources:
    """Return the slots of each host that the job uses.

    Raises ValueError for options that exclude each other, and RuntimeError where this machine has no device.
    """
    pool, named = fetch_hostfile(options.hostfile), False
    filtered = bool(options.include or options.exclude)
    if filtered and (options.num_nodes >= 0 or options.num_gpus >= 0):
        raise ValueError("Cannot specify num_nodes/gpus with include/exclude")
    if pool is not None:
        active = parse_inclusion_exclusion(pool, options.include, options.exclude)
    elif options.num_nodes > 1:
        raise ValueError(f"--num_nodes {options.num_nodes}: Num nodes is >1 but no extra nodes available via hostfile")
    elif visible := _selected_devices(options, filtered):
        named = not all(device.isdecimal() for device in visible)
        active = OrderedDict({LOCALHOST: list(range(len(visible))) if named else [int(device) for device in visible]})
    else:
        active = _local_resources(options)
    active = apply_num_nodes_and_gpus(active, options.num_nodes, options.num_gpus)
    if not active:
        raise ValueError("--include, --exclude: no slot is left to run on")
    several = options.force_multi or len(active) > 1
    if named and several:
        given = ",".join(ranks_command.visible_devices())
        raise ValueError(f"--force_multi: {ranks_command.VISIBLE}={given} names devices, and hosts get numbers of theirs; "
                         "set it to numbers, or drop --force_multi")
    return JobResources(active=active, several=several, named=named)


def _selected_devices(options: argparse.Namespace, filtered: bool) -> list[str]:
    """Return the devices of CUDA_VISIBLE_DEVICES; none where an option selects those of the job."""
    visible = ranks_command.visible_devices()
    if visible and (filtered or options.num_gpus > 0):
        logger.warning("CUDA_VISIBLE_DEVICES=%s is ignored: %s selects the devices", ",".join(visible),
                       "--include or --exclude" if filtered else "--num_gpus")
        return []
    return visible


def _local_resources(options: argparse.Namespace) -> Resources:
    """Return the slots of this machine that the filters leave of all, or of those that --num_gpus counts."""
    count = options.num_gpus if options.num_gpus > 0 else ranks_command.device_count()
    if count == 0:
        raise RuntimeError("Unable to proceed, no GPU resources available")
    return parse_inclusion_exclusion({LOCALHOST: count}, options.include, options.exclude)


# The command


def main(args: Sequence[str] | None = None) -> None:
    """Run the command `deepspeed`; raises SystemExit with the exit code of a job that failed.

    Raises ValueError and RuntimeError as published for wrong options, and `NotSupportedYet` for what is not built.
    """
    options = parse_args(args)
    with messages_from("error" if options.quiet else options.log_level):
        _run(options)


def _run(options: argparse.Namespace) -> None:
    if options.elastic_training and options.no_local_rank:
        raise ValueError("--elastic_training: ranks change at a restart, and are told theirs; drop --no_local_rank")
    if options.module and options.no_python:
        raise ValueError("--module and --no_python: the script cannot be both a module and a program; drop one")
    resources = job_resources(options)
    looked_up = options.no_ssh and len(resources.active) > 1 and not options.master_addr
    _warn_of_unused(options, hosts=resources.several and not options.no_ssh, looked_up=looked_up)
    if options.autotuning:
        run_autotuning(options, resources.active)
    if options.no_ssh:
        _run_here(options, resources, options.node_rank)
    elif resources.several:
        _run_on_hosts(options, resources.active)
    else:
        (host,) = resources.active
        if ranks_command.is_elsewhere(host):
            logger.warning("%s is the only host of this job, and another machine: the ranks start on this one all the same, "
                           "as published. Give --force_multi to start them on %s", host, host)
        _run_here(options, resources, 0)


def _warn_of_unused(options: argparse.Namespace, *, hosts: bool, looked_up: bool) -> None:
    """Warn of options that have no effect.

    `hosts` says whether this command starts the hosts of the job, `looked_up` whether it asks the first for its address.
    """
    elastic, far = options.elastic_training, "hosts that this command starts"
    for option, given, met, needs in (
            ("--bind_core_list", options.bind_core_list is not None, options.bind_cores_to_rank, "--bind_cores_to_rank"),
            ("--min_elastic_nodes", options.min_elastic_nodes >= 0, elastic, "--elastic_training"),
            ("--max_elastic_nodes", options.max_elastic_nodes >= 0, elastic, "--elastic_training"),
            ("--node_rank", options.node_rank >= 0, options.no_ssh, "--no_ssh"),
            ("--launcher_args", options.launcher_args, hosts, far),
            ("--ssh_port", options.ssh_port, hosts or looked_up, far),
            ("--venv_script", options.venv_script, hosts, far)):
        if given and not met:
            logger.warning("%s: has no effect without %s", option, needs)


@contextmanager
def messages_from(level: str) -> Generator[None]:
    """Have the library log messages of this level and above, while the command runs."""
    before = logger.level
    logger.setLevel(get_log_level_from_string(level))
    try:
        yield
    finally:
        logger.setLevel(before)


def command() -> int:
    """Run `main`, and print an error of the user in one line."""
    try:
        main()
    except (ShoalError, ValueError, RuntimeError, AssertionError) as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        return 2
    return 0


def _run_here(options: argparse.Namespace, resources: JobResources, node: int) -> None:
    """Run the ranks of node `node` on this machine. With `--no_ssh` the user starts the others, and all meet."""
    hosts = list(resources.active)
    assert 0 <= node < len(hosts), f"--node_rank: got {node}; with --no_ssh give this node's number, 0 to {len(hosts) - 1}"
    more = _elastic_words(options)
    fewest, most = _elastic_nodes(options, len(hosts))
    if len(hosts) > 1:
        address = options.master_addr or ranks_command.address_of(hosts[0], options.ssh_port, here=node == 0)
        more += ["--nodes", str(most) if fewest == most else f"{fewest}:{most}",
                 "--rendezvous", f"{address}:{options.master_port}", "--node-rank", str(node)]
    elif options.master_port != TORCH_DISTRIBUTED_DEFAULT_PORT:
        more += ["--port", str(options.master_port)]
    slots = resources.active[hosts[node]]
    words = ranks_command.command(
        options.user_script, options.user_args, ranks=len(slots), module=options.module, program=options.no_python,
        local_rank=not options.no_local_rank, bind=options.bind_cores_to_rank, core_list=options.bind_core_list,
        log_dir=_log_dir(options), more=more)
    with _pid_file(options.save_pid):
        code = ranks_command.run(words, devices=None if resources.named else slots, node=node, nodes=len(hosts),
                                 ranks=len(slots))
    if code:
        raise SystemExit(code)


def _run_on_hosts(options: argparse.Namespace, active: Resources) -> None:
    """Run the job on all hosts through `shoal run`, which starts them with the launcher that the options name."""
    multinode_runner.make_runner(options, encode_world_info(active), active)  # raises for what a launcher cannot honour
    exports = ranks_command.exports(EXPORT_ENVS, DEEPSPEED_ENVIRONMENT_PATHS, DEEPSPEED_ENVIRONMENT_NAME, EXCLUDE_ENVS)
    hosts = "@".join(f"{host}:{','.join(map(str, slots))}" for host, slots in active.items())
    fewest, most = _elastic_nodes(options, len(active))
    launcher = LAUNCHERS[options.launcher.lower()]
    if fewest < most and not launcher.survives:
        raise NotSupportedYet(f"--elastic_training --launcher {launcher.name}: it ends all hosts where one is lost; use "
                              f"--launcher pdsh, or give --min_elastic_nodes {most} --max_elastic_nodes {most}")
    more = [*_elastic_words(options), "--hosts", hosts, "--launcher", launcher.name]
    if fewest < len(active):
        more += ["--nodes", str(most) if fewest == most else f"{fewest}:{most}"]
    if options.master_addr or options.master_port != TORCH_DISTRIBUTED_DEFAULT_PORT:
        more += ["--rendezvous", f"{options.master_addr}:{options.master_port}"]
    for option, value in (("--launcher-args", options.launcher_args), ("--ssh-port", options.ssh_port),
                          ("--setup", options.venv_script)):
        if value:
            more.append(f"{option}={value}")
    more += [f"--export={name}" for name in exports]
    words = ranks_command.command(
        options.user_script, options.user_args, ranks=None, module=options.module, program=options.no_python,
        local_rank=not options.no_local_rank, bind=options.bind_cores_to_rank, core_list=options.bind_core_list,
        log_dir=_log_dir(options), more=more)
    with _pid_file(options.save_pid):
        code = ranks_command.run(words, devices=None, nodes=len(active), ranks=sum(map(len, active.values())),
                                 variables=exports)
    if code:
        raise SystemExit(code)


def _elastic_words(options: argparse.Namespace) -> list[str]:
    return ["--max-restarts", str(RESTARTS)] if options.elastic_training else []


def _elastic_nodes(options: argparse.Namespace, nodes: int) -> tuple[int, int]:
    """Return the fewest and the most nodes of the job. Raises ValueError for numbers that are no range of them."""
    if not options.elastic_training:
        return nodes, nodes
    fewest = 1 if options.min_elastic_nodes < 0 else options.min_elastic_nodes
    most = nodes if options.max_elastic_nodes < 0 else options.max_elastic_nodes
    if not 1 <= fewest <= most <= nodes:
        raise ValueError(f"--min_elastic_nodes, --max_elastic_nodes: got {fewest} and {most} with {nodes} nodes; give "
                         f"1 <= min <= max <= {nodes}, or list more hosts")
    return fewest, most


def _log_dir(options: argparse.Namespace) -> str | None:
    return None if options.enable_each_rank_log == "None" else options.enable_each_rank_log


@contextmanager
def _pid_file(wanted: bool) -> Generator[None]:
    """Keep the id of this process in /tmp/PID.deepspeed while the job runs: a signal to it ends the job."""
    file = Path("/tmp") / f"{os.getpid()}.deepspeed"
    if wanted:
        file.write_text(json.dumps([os.getpid()]))
    try:
        yield
    finally:
        if wanted:
            file.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(command())
