"""What all ranks must be of one mind about, said and compared once, before anything is built of it.

    the model            of a pipeline: its layers, by name, class and size; where stages begin; its schedule
    the mesh             which rank is where
    the configuration    every key but those that concern a rank alone

Everything else that ranks compare later is of ranks that hold the same parameters; ranks of different stages hold none in
common, and would train different models without a word.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from torch import nn

from shoal.config.resolve import leaves
from shoal.engine.schema import Config
from shoal.errors import RanksDisagree
from shoal.mesh.mesh import Mesh
from shoal.pipeline.module import PipelineModule
from shoal.transport import process_group

__all__ = ["agree", "facts_of"]

OWN = ("aio", "dump_state", "log_level", "steps_per_print", "timeout", "vocabulary_size", "nvme_path")
"""Keys that ranks may differ in, at any depth."""


def facts_of(model: nn.Module, mesh: Mesh, settings: Config) -> dict[str, str]:
    """Return what must be the same on every rank, by what it is, the most telling first."""
    facts = dict(model.facts()) if isinstance(model, PipelineModule) else {"pipeline": "none"}
    facts["mesh"] = f"{mesh} of ranks {mesh.ranks.flatten().tolist()}"
    facts |= {f"configuration, {path}": repr(value) for path, value in leaves(settings.as_dict())
              if not set(path.split(".")) & set(OWN)}
    return facts


def agree(facts: Mapping[str, str]) -> str:
    """Return a word that no other job and no other call of this one has. Raises `RanksDisagree` at the first difference."""
    said = process_group.gather_objects((dict(facts), secrets.token_hex(8)), "initialize")
    first, word = said[0]
    for rank, (theirs, _) in enumerate(said):
        for what in (*first, *theirs):
            if first.get(what) != theirs.get(what):
                raise RanksDisagree(f"initialize: ranks differ in {what}: rank 0 has {first.get(what, 'none')}, rank {rank} "
                                    f"has {theirs.get(what, 'none')}; give every rank the same layers, in the same order, "
                                    f"and the same configuration")
    return word
