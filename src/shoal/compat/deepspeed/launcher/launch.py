"""`deepspeed.launcher.launch`: the ranks of one node, as the back ends of several nodes start it on each.

The ranks run through `shoal run`, which gives each its variables, ends all when one fails, and returns its exit code.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from argparse import REMAINDER
from collections.abc import Sequence

from shoal.compat import ranks_command
from shoal.compat.deepspeed.launcher.constants import TORCH_DISTRIBUTED_DEFAULT_PORT

__all__ = ["main", "parse_args"]

PID_FILE_BASEPATH = "/tmp"
CROSS_RANK, CROSS_SIZE = "CROSS_RANK", "CROSS_SIZE"


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line of one node's launcher."""
    parser = argparse.ArgumentParser(description="Start the ranks of one node.")
    add = parser.add_argument
    add("--node_rank", type=int, default=0, help="the number of this node")
    add("--master_addr", default="127.0.0.1", help="address of rank 0's node")
    add("--master_port", type=int, default=TORCH_DISTRIBUTED_DEFAULT_PORT, help="port of rank 0's store")
    add("--world_info", default="None", help="the slots of each host: JSON in urlsafe base64")
    add("--module", action="store_true", help="run the script as `python -m`")
    add("--no_python", action="store_true", help="execute the script itself, without python")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    add("--save_pid", type=int, default=0, help="accepted; the process that starts this one writes the file")
    add("--enable_each_rank_log", default="None", help="write the output of each rank to files in this folder")
    add("--bind_cores_to_rank", action="store_true", help="bind each rank to its share of the cores")
    add("--bind_core_list", default=None, help="the cores to share, such as 0-7,16")
    add("training_script", help="the script, module or program")
    add("training_script_args", nargs=REMAINDER, help="its arguments")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Run the ranks of this node; raises SystemExit with the exit code of a job that failed."""
    options = parse_args(args)
    assert options.world_info != "None", "must provide world info dict"
    world: dict[str, list[int]] = json.loads(base64.urlsafe_b64decode(options.world_info))
    hosts = list(world)
    slots = world[hosts[options.node_rank]]
    address = f"{options.master_addr}:{options.master_port}"
    more = ["--port", str(options.master_port)] if len(hosts) == 1 else [
        "--nodes", str(len(hosts)), "--rendezvous", address, "--node-rank", str(options.node_rank)]
    words = ranks_command.command(
        options.training_script, options.training_script_args, ranks=len(slots), module=options.module,
        program=options.no_python, local_rank=not options.no_local_rank, bind=options.bind_cores_to_rank,
        core_list=options.bind_core_list,
        log_dir=None if options.enable_each_rank_log == "None" else options.enable_each_rank_log, more=more)
    code = ranks_command.run(words, devices=slots, node=options.node_rank, nodes=len(hosts), ranks=len(slots))
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
