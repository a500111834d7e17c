"""The optimizer files of a published checkpoint, as the ranks of a smaller grid need them.

Files are parsed without unpickling. Stages 1 and 2 are read; a folder of stage 3 names what converts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from shoal.compat.deepspeed.checkpoint import constants
from shoal.compat.deepspeed.checkpoint.reshape_3d_utils import get_model_3d_descriptor, model_3d_desc
from shoal.compat.deepspeed.checkpoint.reshape_utils import basic_folder_validation, get_zero_files, merge_state
from shoal.compat.deepspeed.utils.logging import logger
from shoal.compat.deepspeed.utils.tensor_fragment import fragment_address
from shoal.compat.raising import as_published
from shoal.errors import CheckpointError
from shoal.interchange.archive import Opaque, load_archive

__all__ = ["ZeROCheckpoint", "check_model_files", "load_state"]

State = dict[str, Any]
FRAGMENT = "deepspeed.utils.tensor_fragment.fragment_address"


def load_state(path: str) -> State:
    """Return the contents of one file: tensors and plain containers, `fragment_address`, and records of other objects."""
    return cast("State", _published(load_archive(Path(path))))


def _published(value: Any) -> Any:
    match value:
        case Opaque(name=name) if name == FRAGMENT:
            return fragment_address(**{key: cast("int", value.attribute(key)) for key in ("numel", "start")})
        case dict():
            return {key: _published(each) for key, each in cast("State", value).items()}
        case list():
            return [_published(each) for each in cast("list[object]", value)]
        case _:
            return value


def check_model_files(dir: str) -> None:
    """Raise `AssertionError` for no folder of a published checkpoint, and for one of stage 3, whose weights are sharded."""
    basic_folder_validation(dir)
    names = [path.name for path in Path(dir).iterdir()]
    if any(name.startswith(constants.MODEL_FILE_PREFIX) for name in names):
        return
    if any(name.endswith(constants.MODEL_FILE_SUFFIX) for name in names):
        raise CheckpointError(f"{dir}: holds a checkpoint of stage 3, whose weights are slices. Write one of stage 1 by "
                              f"`shoal checkpoint convert DIR OUT --stage 1`, or whole fp32 weights by zero_to_fp32")
    raise CheckpointError(f"{dir}: holds no {constants.MODEL_FILE_PREFIX}* files; give the folder of a tag, DIR/TAG")


class ZeROCheckpoint:
    """The optimizer states in a folder, for the grid that saved it, or for one with shorter axes (`reshape`)."""

    @as_published
    def __init__(self, dir: str, source_3d: model_3d_desc | None = None):
        """Read the names of the files; `source_3d` tells the grid that saved them, otherwise the names do."""
        self.dir = str(dir)
        check_model_files(self.dir)
        self.file_list = get_zero_files(self.dir)
        if not self.file_list:
            raise CheckpointError(f"{dir}: holds no optimizer files of ZeRO; stage 0 keeps its state in the model file")
        self.num_files = len(self.file_list)
        self.src_3d = get_model_3d_descriptor(self.dir) if source_3d is None else source_3d
        self.target_3d = self.src_3d
        self._3d_file_map = self.src_3d.reshape(self.target_3d)

    def get_src_world_size(self) -> int:
        """Return how many ranks saved the checkpoint."""
        return self.src_3d.world_size()

    def get_src_tp_degree(self) -> int:
        """Return how many tensor ranks did."""
        return self.src_3d.tp_degree

    def get_src_pp_degree(self) -> int:
        """Return how many pipeline ranks did."""
        return self.src_3d.pp_degree

    def get_src_dp_degree(self) -> int:
        """Return how many data ranks did."""
        return self.src_3d.dp_degree

    def get_file_indices_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[int]:
        """Return the numbers, in `file_list`, of the files that a rank needs; raises `AssertionError` for no such rank."""
        degree = len(self._3d_file_map)
        assert dp_index < degree, f"dp_index: got {dp_index}; there are {degree} data ranks"
        return self._3d_file_map[dp_index].get_data(pp_index, tp_index)

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Return the paths of the files that a rank needs."""
        return [self.file_list[index] for index in self.get_file_indices_for_rank(pp_index, tp_index, dp_index)]

    def get_state_for_rank(self, pp_index: int, tp_index: int, dp_index: int, keys_to_ignore: Sequence[str] = (),
                           strip_tensor_paddings: bool = True) -> State:
        """Return the contents of a rank's files, joined; without `keys_to_ignore` at the top level.

        With `strip_tensor_paddings` the moments are as long as the masters, which are saved without padding. Several files
        are always stripped: padding lies at the end of a data rank's slice.
        """
        found: State | None = None
        files = self.get_files_for_rank(pp_index, tp_index, dp_index)
        for path in files:
            state = {key: value for key, value in load_state(path).items() if key not in keys_to_ignore}
            inner = state.get(constants.OPTIMIZER_STATE_DICT, {})
            if strip_tensor_paddings or len(files) > 1:
                _strip(inner)
            found = state if found is None else _join(found, state)
        assert found is not None
        inner = found.get(constants.OPTIMIZER_STATE_DICT, {})
        if constants.PARTITION_COUNT in inner:
            counts = inner[constants.PARTITION_COUNT]
            target = self.target_3d.dp_degree
            inner[constants.PARTITION_COUNT] = [target] * len(counts) if isinstance(counts, list) else target
        return found

    def reshape(self, target_3d_desc: model_3d_desc) -> None:
        """Read for the ranks of a grid with shorter axes; raises `AssertionError` for one that grows."""
        self._3d_file_map = self.src_3d.reshape(target_3d_desc)
        self.target_3d = target_3d_desc

    def print_3d_index_map(self, tag: str | None = None) -> None:
        """Log which files each rank needs, by number."""
        self._print("3D index map", tag, self.get_file_indices_for_rank)

    def print_3d_file_map(self, tag: str | None = None) -> None:
        """Log which files each rank needs, by path."""
        self._print("3D file map", tag, self.get_files_for_rank)

    def _print(self, what: str, tag: str | None, files_of: Any) -> None:
        logger.info("%s%s", what, f": {tag}" if tag else "")
        for dp, grid in enumerate(self._3d_file_map):
            for pp in range(grid.pp_degree):
                for tp in range(grid.tp_degree):
                    logger.info("dp %d, pp %d, tp %d = %s", dp, pp, tp, files_of(pp, tp, dp))


def _strip(inner: State) -> None:
    """Cut the padding off the moments of each group."""
    paddings = inner.get(constants.GROUP_PADDINGS)
    if not paddings:
        return
    moments: Mapping[int, State] = inner.get(constants.BASE_OPTIMIZER_STATE, {}).get("state", {})
    for group, padding in enumerate(paddings):
        state = moments.get(group, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and padding:
                state[key] = value[:-padding]
    inner[constants.GROUP_PADDINGS] = [0] * len(paddings)


def _join(first: State, second: State) -> State:
    """Return two ranks' contents as those of one: tensors by their elements, and slices where they lie then."""
    joined = merge_state(first, second)
    one, other = first.get(constants.OPTIMIZER_STATE_DICT, {}), second.get(constants.OPTIMIZER_STATE_DICT, {})
    slices = one.get(constants.PARAM_SLICE_MAPPINGS)
    if slices is not None:
        masters = one[constants.SINGLE_PARTITION_OF_FP32_GROUPS]
        joined[constants.OPTIMIZER_STATE_DICT][constants.PARAM_SLICE_MAPPINGS] = [
            _joined_slices(mine, theirs, master.numel())
            for mine, theirs, master in zip(slices, other[constants.PARAM_SLICE_MAPPINGS], masters, strict=True)]
    return joined


def _joined_slices(one: Mapping[str, fragment_address], other: Mapping[str, fragment_address],
                   offset: int) -> dict[str, fragment_address]:
    """Return where slices lie once those of `other` follow `offset` elements; one that goes on there is one slice."""
    found = {name: fragment_address(numel=each.numel, start=each.start) for name, each in one.items()}
    for name, each in other.items():
        begun = found.get(name)
        start, before = (offset + each.start, 0) if begun is None else (begun.start, begun.numel)
        found[name] = fragment_address(numel=before + each.numel, start=start)
    return found
