"""The command `ds_elastic`: the batch of an elastic job, and the sizes at which it may run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from shoal.compat.deepspeed.elasticity.elasticity import ElasticityError, compute_elastic_config
from shoal.config.load import read
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
        given: dict[str, Any] = dict(read(options.config))
        total, sizes, *micro = compute_elastic_config(given, max(__version__, "0.3.8"), options.world_size)
        of_model = given["elasticity"].get("model_parallel_size", 1)
        if options.world_size % of_model:
            raise ElasticityError(f"{options.world_size} ranks hold no whole number of copies of a model on {of_model} "
                                  f"ranks (elasticity.model_parallel_size); give a multiple of {of_model}")
    except (ElasticityError, ShoalError, ValueError) as error:
        sys.stderr.write(f"ds_elastic: {error}\n")
        return 2
    kind = "ranks" if of_model == 1 else f"data ranks, each of {of_model} ranks"
    sys.stdout.write(f"global batch: {total} samples\n{kind}: {', '.join(map(str, sizes))}\n")
    if micro:
        accumulation = total // (options.world_size // of_model) // micro[0] if micro[0] else None
        sys.stdout.write(f"micro-batch on {options.world_size} ranks: {micro[0]}, accumulation {accumulation}\n")
    return 0
