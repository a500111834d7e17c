"""The command `ds_elastic`: the batch of an elastic job, and the sizes at which it may run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shoal.compat.deepspeed.elasticity.elasticity import ElasticityError, compute_elastic_config
from shoal.errors import ShoalError
from shoal.version import __version__

__all__ = ["command"]


def command(words: Sequence[str] | None = None) -> int:
    """Print the batch of `-c FILE`, and with `-w RANKS` its micro-batch; return 0, or 2 with a message if there is none."""
    parser = argparse.ArgumentParser(prog="ds_elastic", description=__doc__)
    parser.add_argument("-c", "--config", required=True, help="the configuration, a JSON file")
    parser.add_argument("-w", "--world-size", type=int, default=0, help="the number of ranks")
    options = parser.parse_args(words)
    try:
        total, sizes, *micro = compute_elastic_config(options.config, max(__version__, "0.3.8"), options.world_size)
    except (ElasticityError, ShoalError, ValueError) as error:
        sys.stderr.write(f"ds_elastic: {error}\n")
        return 2
    sys.stdout.write(f"global batch: {total} samples\nranks: {', '.join(map(str, sizes))}\n")
    if micro:
        accumulation = total // options.world_size // micro[0] if micro[0] else None
        sys.stdout.write(f"micro-batch on {options.world_size} ranks: {micro[0]}, accumulation {accumulation}\n")
    return 0
