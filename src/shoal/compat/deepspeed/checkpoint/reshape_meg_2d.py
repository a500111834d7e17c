"""Which old ranks hold what a new rank of a pipeline x tensor grid needs, when the grid shrinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.compat.deepspeed.checkpoint.reshape_utils import partition_data
from shoal.compat.deepspeed.utils.logging import logger

__all__ = ["get_mpu_ranks", "meg_2d_parallel_map", "reshape_meg_2d_parallel"]


class meg_2d_parallel_map:
    """A list of items for each place of a grid; `map` holds it under the key "PP,TP"."""

    def __init__(self, pp_degree: int, tp_degree: int):
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.map: dict[str, list[Any]] = {}

    def simple_init(self) -> None:
        """Give each place its own number, tensor ranks counting fastest."""
        self.map = {self._key(index // self.tp_degree, index % self.tp_degree): [index]
                    for index in range(self.pp_degree * self.tp_degree)}

    def add_data(self, pp_index: int, tp_index: int, data: Sequence[Any]) -> None:
        """Append items to a place; raises `AssertionError` for one outside the grid, or for no list."""
        assert isinstance(data, list), f"add_data: got a {type(data).__name__}; give a list"
        self._check(pp_index, tp_index)
        self.map.setdefault(self._key(pp_index, tp_index), []).extend(data)

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[Any]:
        """Return the items of one place, of a row, of a column, or of the whole grid."""
        self._check(pp_index or 0, tp_index or 0)
        rows = range(self.pp_degree) if pp_index is None else [pp_index]
        columns = range(self.tp_degree) if tp_index is None else [tp_index]
        return [item for row in rows for column in columns for item in self.map[self._key(row, column)]]

    def print_data(self, tag: str) -> None:
        """Log the items of each place."""
        logger.info("%s", tag)
        for key, value in self.map.items():
            logger.info("%s = %s", key, value)

    def _check(self, pp_index: int, tp_index: int) -> None:
        assert pp_index < self.pp_degree, f"pp_index: got {pp_index}; the grid has {self.pp_degree} rows"
        assert tp_index < self.tp_degree, f"tp_index: got {tp_index}; the grid has {self.tp_degree} columns"

    @staticmethod
    def _key(pp_index: int, tp_index: int) -> str:
        return f"{pp_index},{tp_index}"


def _reshape_tp_dimension(old_2d_map: meg_2d_parallel_map, new_tp_degree: int) -> meg_2d_parallel_map:
    new = meg_2d_parallel_map(old_2d_map.pp_degree, new_tp_degree)
    for row in range(old_2d_map.pp_degree):
        for column, items in enumerate(partition_data(old_2d_map.get_data(pp_index=row), new_tp_degree)):
            new.add_data(row, column, items)
    return new


def _reshape_pp_dimension(old_2d_map: meg_2d_parallel_map, new_pp_degree: int) -> meg_2d_parallel_map:
    new = meg_2d_parallel_map(new_pp_degree, old_2d_map.tp_degree)
    for column in range(old_2d_map.tp_degree):
        for row, items in enumerate(partition_data(old_2d_map.get_data(tp_index=column), new_pp_degree)):
            new.add_data(row, column, items)
    return new


def reshape_meg_2d_parallel(old_pp_degree: int, old_tp_degree: int, new_pp_degree: int, new_tp_degree: int,
                            verbose: bool = False) -> meg_2d_parallel_map:
    """Return the old ranks of each place of the new grid; raises `AssertionError` for a grid that grows."""
    assert new_pp_degree <= old_pp_degree, f"pipeline ranks: got {new_pp_degree} from {old_pp_degree}; they cannot grow"
    assert new_tp_degree <= old_tp_degree, f"tensor ranks: got {new_tp_degree} from {old_tp_degree}; they cannot grow"
    found = meg_2d_parallel_map(old_pp_degree, old_tp_degree)
    found.simple_init()
    if new_tp_degree != old_tp_degree:
        found = _reshape_tp_dimension(found, new_tp_degree)
    if new_pp_degree != old_pp_degree:
        found = _reshape_pp_dimension(found, new_pp_degree)
    if verbose:
        found.print_data("reshaped:")
    return found


def get_mpu_ranks(tp_size: int = 1, pp_size: int = 1, dp_size: int = 1, virtual_pp_size: int | None = None,
                  ) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Return the ranks of each tensor group, replica of the model, and data group: tensor ranks count fastest, then data."""
    world, per_stage = tp_size * pp_size * dp_size, tp_size * dp_size
    tensor = [list(range(first, first + tp_size)) for first in range(0, world, tp_size)]
    replicas = [[rank for rank in range(world) if rank // tp_size % dp_size == number] for number in range(dp_size)]
    data = [list(range(stage * per_stage + first, (stage + 1) * per_stage, tp_size))
            for stage in range(pp_size) for first in range(tp_size)]
    return tensor, replicas, data
