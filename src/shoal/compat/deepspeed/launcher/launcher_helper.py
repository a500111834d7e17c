"""The helper that MPICH starts as each rank: it translates the variables of MPI and runs the script in this process."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import MutableMapping, Sequence

__all__ = ["env_mapping", "main", "parse_args"]

RANKS = ("PMIX_RANK", "PMI_RANK")
LOCAL_RANKS = ("PALS_LOCAL_RANKID", "MPI_LOCALRANKID")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line of the helper."""
    parser = argparse.ArgumentParser(description="Give a rank of MPI its variables, and run a script.")
    parser.add_argument("--launcher", default="mpich", help="the back end")
    parser.add_argument("--module", action="store_true", help="run the script as `python -m`")
    parser.add_argument("--no_python", action="store_true", help="execute the script itself, without python")
    parser.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)


def env_mapping(env: MutableMapping[str, str], rank_name_list: Sequence[str] | None = None,
                local_rank_name_list: Sequence[str] | None = None) -> MutableMapping[str, str]:
    """Set RANK and LOCAL_RANK by the variables of MPI. Raises EnvironmentError where two of them disagree or all lack."""
    for name, sources in (("RANK", rank_name_list or RANKS), ("LOCAL_RANK", local_rank_name_list or LOCAL_RANKS)):
        found = {env[source] for source in sources if source in env}
        if len(found) != 1:
            raise OSError(f"{name}: expected one value in {', '.join(sources)}, got {sorted(found) or 'none'}")
        env[name] = found.pop()
    return env


def main(args: Sequence[str] | None = None) -> None:
    """Run the script of this rank in the place of this process."""
    options = parse_args(args)
    env = env_mapping(dict(os.environ))
    words = [] if options.no_python else [sys.executable, "-u", *(["-m"] if options.module else [])]
    words.append(options.user_script)
    if not options.no_local_rank:
        words.append(f"--local_rank={env['LOCAL_RANK']}")
    os.execvpe(words[0], [*words, *options.user_args], dict(env))


if __name__ == "__main__":
    main()
