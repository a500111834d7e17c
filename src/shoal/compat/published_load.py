"""The results of `load_checkpoint` as published: the path of a model file, and its keys that the engine does not use."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from shoal.interchange.archive import load_archive
from shoal.interchange.layout import RESERVED, model_file

__all__ = ["LEFT_OVER", "load_result"]

CONSUMED = frozenset({"module", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps",
                      "dp_world_size", "mp_world_size"})
LEFT_OVER = RESERVED - CONSUMED
"""Keys of a model file that published scripts find in the client's state, and may pass to the next save."""


def load_result(path: str, client: dict[str, Any], rank: int) -> tuple[str, dict[str, Any]]:
    """Return the result of a load of the folder `path` returns on data rank `rank`.

    Tensors of the optimizer, which stage 0 leaves there, stay in the mapped file until they are read.
    """
    folder = Path(path)
    file = next((file for stage, number in ((0, 0), (3, rank), (3, 0))
                 if (file := folder / model_file(stage, number)).is_file()), None)
    if file is None:
        return path, client
    state = cast("dict[str, Any]", load_archive(file))
    return str(file), {**{key: value for key, value in state.items()
                          if key in LEFT_OVER and (key != "optimizer" or value is not None)}, **client}
