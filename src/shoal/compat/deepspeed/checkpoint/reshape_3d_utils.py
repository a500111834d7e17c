"""Which old ranks hold what a new rank of a pipeline x tensor x data grid needs, when the grid shrinks."""

from __future__ import annotations

import os
import re

from shoal.compat.deepspeed.checkpoint.constants import LAYER_FILE_PREFIX, MODEL_FILE_PREFIX
from shoal.compat.deepspeed.checkpoint.reshape_meg_2d import meg_2d_parallel_map, reshape_meg_2d_parallel
from shoal.compat.deepspeed.checkpoint.reshape_utils import (
    basic_folder_validation,
    get_files,
    get_files_with_prefix,
    get_zero_files,
    partition_data,
)

__all__ = ["DP_DIM", "PP_DIM", "TP_DIM", "flatten_dp_dimension", "get_model_3d_descriptor", "model_3d_desc",
           "unflatten_dp_dimension"]

PP_DIM, TP_DIM, DP_DIM = "PP", "TP", "DP"


class model_3d_desc:
    """How many pipeline, tensor and data ranks there are."""

    def __init__(self, pp_degree: int = 1, tp_degree: int = 1, dp_degree: int = 1):
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.dp_degree = dp_degree

    def _degrees(self) -> dict[str, int]:
        return {PP_DIM: self.pp_degree, TP_DIM: self.tp_degree, DP_DIM: self.dp_degree}

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.pp_degree * self.tp_degree * self.dp_degree

    def get_desc(self) -> str:
        """Return the numbers as text."""
        return f"{PP_DIM},{TP_DIM},{DP_DIM} = ({self.pp_degree}, {self.tp_degree}, {self.dp_degree})"

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """Return whether there is such a rank, and what is wrong."""
        given = {PP_DIM: pp_index, TP_DIM: tp_index, DP_DIM: dp_index}
        errors = [f"{axis} indexing error: index {given[axis]} >= degree {degree}"
                  for axis, degree in self._degrees().items() if given[axis] >= degree]
        return not errors, errors

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """Return whether the grid can become the target, whose axes may not be longer, and what is wrong."""
        wanted = target_3d_desc._degrees()
        errors = [f"Expansion reshape not supported - {axis}: {degree} ---> {wanted[axis]}"
                  for axis, degree in self._degrees().items() if wanted[axis] > degree]
        return not errors, errors

    def reshape(self, target_3d_desc: model_3d_desc, verbose: bool = False) -> list[meg_2d_parallel_map]:
        """Return the old ranks of each new one, a pipeline x tensor grid for each data rank.

        Raises `AssertionError` for an axis that grows.
        """
        possible, errors = self.can_reshape(target_3d_desc)
        assert possible, ", ".join(errors)
        grid = reshape_meg_2d_parallel(self.pp_degree, self.tp_degree, target_3d_desc.pp_degree, target_3d_desc.tp_degree,
                                       verbose)
        flat = flatten_dp_dimension(grid, self.pp_degree * self.tp_degree, self.dp_degree)
        return unflatten_dp_dimension(flat, target_3d_desc.dp_degree)


def flatten_dp_dimension(meg_2d_map: meg_2d_parallel_map, src_2d_size: int, dp_degree: int) -> meg_2d_parallel_map:
    """Return the grid with the ranks of all data ranks in each place."""
    new = meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree)
    for row in range(new.pp_degree):
        for column in range(new.tp_degree):
            new.add_data(row, column, [index + number * src_2d_size for index in meg_2d_map.get_data(row, column)
                                       for number in range(dp_degree)])
    return new


def unflatten_dp_dimension(meg_2d_map: meg_2d_parallel_map, dp_degree: int) -> list[meg_2d_parallel_map]:
    """Return a grid for each data rank, among which the ranks of each place are divided."""
    grids = [meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree) for _ in range(dp_degree)]
    for row in range(meg_2d_map.pp_degree):
        for column in range(meg_2d_map.tp_degree):
            for grid, items in zip(grids, partition_data(meg_2d_map.get_data(row, column), dp_degree), strict=True):
                grid.add_data(row, column, items)
    return grids


def get_model_3d_descriptor(dir: str) -> model_3d_desc:
    """Return the ranks that saved a checkpoint, by the names of its files. Raises `AssertionError` without a folder."""
    basic_folder_validation(dir)
    files = get_files(dir)
    models = get_files_with_prefix(files, MODEL_FILE_PREFIX)
    layers = {_first(path) for path in get_files_with_prefix(files, LAYER_FILE_PREFIX)}
    if layers:
        first = min(layers)
        tensor = len([path for path in get_files_with_prefix(files, LAYER_FILE_PREFIX) if _first(path) == first])
        stages = len(models) // tensor
    else:
        stages, tensor = 1, max(len(models), 1)
    return model_3d_desc(stages, tensor, max(1, len(get_zero_files(dir)) // (stages * tensor)))


def _first(path: str) -> int:
    found = re.search(r"\d+", os.path.basename(path))
    return -1 if found is None else int(found[0])
