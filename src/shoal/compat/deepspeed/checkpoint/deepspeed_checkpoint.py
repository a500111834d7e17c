"""A published checkpoint by its files: those of the model, of the layers of a pipeline, and of ZeRO's optimizer.

    layer_00 ... layer_NN      of a pipeline: the first is the embedding, `final_layer_norm_idx` the final norm (the last
                               by default), the others before it are the transformer
    mp_rank_00, mp_rank_01     pipeline and tensor ranks: the whole model without a pipeline, its counters with one
    zero_pp_rank_...           ZeROCheckpoint

Files are parsed without unpickling. The axes may be read shorter than they were saved; layers that tensor ranks slice are
read by as many tensor ranks as saved them.
"""

from __future__ import annotations

import os
import re
from typing import Any

from shoal.compat.deepspeed.checkpoint import constants
from shoal.compat.deepspeed.checkpoint.reshape_3d_utils import model_3d_desc
from shoal.compat.deepspeed.checkpoint.reshape_meg_2d import meg_2d_parallel_map, reshape_meg_2d_parallel
from shoal.compat.deepspeed.checkpoint.reshape_utils import get_files, get_files_with_prefix, merge_state, validate_files
from shoal.compat.deepspeed.checkpoint.zero_checkpoint import State, ZeROCheckpoint, check_model_files, load_state
from shoal.compat.deepspeed.utils.logging import logger
from shoal.compat.raising import as_published
from shoal.errors import NotSupportedYet

__all__ = ["DeepSpeedCheckpoint"]

_LAYER = re.compile(rf"{constants.LAYER_FILE_PREFIX}\d+")
ITERATION, ARGS, CHECKPOINT_INFO = "iteration", "args", "checkpoint_info"
"""Keys of the client's state that Megatron's scripts save."""


class DeepSpeedCheckpoint:
    """The files and states of the folder of a tag, for as many tensor, pipeline and data ranks as saved it, or fewer."""

    @as_published
    def __init__(self, dir: str, tp_degree: int | None = None, pp_degree: int | None = None, dp_degree: int | None = None,
                 final_layer_norm_idx: int = -1):
        """Read names of files, and the counters of the first. Raises `AssertionError` for a degree that grows."""
        self.dir, self.final_layer_norm_idx = str(dir), final_layer_norm_idx
        check_model_files(self.dir)
        self.file_list = get_files(self.dir)
        self.layer_files = get_files_with_prefix(self.file_list, constants.LAYER_FILE_PREFIX)
        self.mp_rank_files = get_files_with_prefix(self.file_list, constants.MODEL_FILE_PREFIX)
        self.zero_checkpoint = ZeROCheckpoint(self.dir)
        source = self.zero_checkpoint.src_3d
        self.original_tp_degree, self.original_pp_degree = source.tp_degree, source.pp_degree
        self.tp_degree, self.pp_degree = tp_degree or source.tp_degree, pp_degree or source.pp_degree
        self.dp_degree = dp_degree or source.dp_degree
        self.original_world_size = source.world_size()
        self.world_size = self.tp_degree * self.pp_degree * self.dp_degree
        self.layer_keys = sorted({_layer(path) for path in self.layer_files})
        self.layer_count = len(self.layer_keys)
        if self.layer_files and self.is_change_tp_degree():
            raise NotSupportedYet(f"DeepSpeedCheckpoint: tp_degree: got {tp_degree} for layers of {source.tp_degree} tensor "
                                  f"ranks; joining their slices is not supported yet: read them by as many")
        self.old_2d_map = meg_2d_parallel_map(source.pp_degree, source.tp_degree)
        self.old_2d_map.simple_init()
        self.new_2d_map = reshape_meg_2d_parallel(source.pp_degree, source.tp_degree, self.pp_degree, self.tp_degree)
        if self.world_size != self.original_world_size:
            self.zero_checkpoint.reshape(model_3d_desc(self.pp_degree, self.tp_degree, self.dp_degree))
        first = load_state(self.mp_rank_files[0])
        self.global_state: State = {key: first.get(key) for key in (
            ITERATION, ARGS, CHECKPOINT_INFO, constants.UNIVERSAL_CHECKPOINT_INFO)}

    # The grid

    def is_change_tp_degree(self) -> bool:
        """Whether fewer tensor ranks read than saved."""
        return self.tp_degree != self.original_tp_degree

    def is_change_pp_degree(self) -> bool:
        """Whether fewer pipeline ranks read than saved."""
        return self.pp_degree != self.original_pp_degree

    def is_change_dp_degree(self) -> bool:
        """Whether fewer data ranks read than saved."""
        return self.dp_degree != self.zero_checkpoint.get_src_dp_degree()

    # The client's state

    def get_iteration(self) -> Any:
        """Return the iteration that Megatron saved, 0 where it saved none."""
        return self.global_state[ITERATION] or 0

    def get_args(self) -> Any:
        """Return the arguments that Megatron saved."""
        return self.global_state[ARGS]

    def get_checkpoint_info(self, info_key: str = CHECKPOINT_INFO) -> Any:
        """Return one of the descriptions that the client saved."""
        if info_key not in self.global_state:
            self.global_state[info_key] = load_state(self.mp_rank_files[0]).get(info_key)
        return self.global_state[info_key]

    # The optimizer

    def get_zero_checkpoint_state(self, pp_index: int, tp_index: int, dp_index: int,
                                  strip_tensor_paddings: bool = True) -> State:
        """Return the optimizer state of one rank."""
        return self.zero_checkpoint.get_state_for_rank(pp_index, tp_index, dp_index,
                                                       strip_tensor_paddings=strip_tensor_paddings)

    def get_zero_files(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Return the optimizer files of one rank."""
        return self.zero_checkpoint.get_files_for_rank(pp_index, tp_index, dp_index)

    # The model

    def get_2d_parallel_files(self, tp_index: int, pp_index: int) -> list[str]:
        """Return the model files of one pipeline and tensor rank."""
        return [self.mp_rank_files[index] for index in self.new_2d_map.get_data(pp_index, tp_index)]

    def get_2d_parallel_state(self, tp_index: int, pp_index: int) -> State:
        """Return the contents of these files, joined."""
        return _merged(self.get_2d_parallel_files(tp_index, pp_index))

    def get_embedding_layer_id(self) -> str:
        """Return the first layer; raises `IndexError` without a pipeline's layers."""
        return self.layer_keys[0]

    def get_final_norm_layer_id(self) -> str:
        """Return the layer of the final norm; raises `IndexError` without a pipeline's layers."""
        return self.layer_keys[self.final_layer_norm_idx]

    def get_embedding_files(self, tp_index: int) -> list[str]:
        """Return the file of the embedding on a tensor rank."""
        self._check_layers()
        return [self._layer_file(self.get_embedding_layer_id(), tp_index)]

    def get_embedding_state(self, tp_index: int) -> State:
        """Return the weights of the embedding on a tensor rank."""
        return load_state(self.get_embedding_files(tp_index)[0])

    def get_final_norm_files(self, tp_index: int) -> list[str]:
        """Return the file of the final norm on a tensor rank."""
        self._check_layers()
        return [self._layer_file(self.get_final_norm_layer_id(), tp_index)]

    def get_final_norm_state(self, tp_index: int) -> State:
        """Return the weights of the final norm on a tensor rank."""
        return load_state(self.get_final_norm_files(tp_index)[0])

    def get_pp_transformer_map(self, pp_index: int) -> list[str]:
        """Return the transformer's layers of a pipeline rank: equal numbers of them, and the rest on the last."""
        layers = self.layer_keys[1:self.layer_keys.index(self.get_final_norm_layer_id())] if self.layer_keys else []
        share = len(layers) // self.pp_degree
        last = pp_index == self.pp_degree - 1
        return layers[pp_index * share:None if last else (pp_index + 1) * share]

    def get_transformer_state(self, tp_index: int, pp_index: int) -> list[State]:
        """Return the weights of each layer of the transformer on a tensor and pipeline rank."""
        self._check_layers()
        return [load_state(self._layer_file(layer, tp_index)) for layer in self.get_pp_transformer_map(pp_index)]

    # What there is

    def validate_files(self) -> None:
        """Log the files that are missing."""
        validate_files(self.file_list)

    def show_2d_mapping(self) -> None:
        """Log the model files of each pipeline and tensor rank."""
        logger.info("2D map")
        for pp in range(self.pp_degree):
            for tp in range(self.tp_degree):
                logger.info("[%d, %d] = %s", pp, tp, self.get_2d_parallel_files(tp_index=tp, pp_index=pp))

    def show_pp_transformer_map(self) -> None:
        """Log the layers of the transformer on each pipeline rank."""
        for pp in range(self.pp_degree):
            logger.info("%d = %s", pp, self.get_pp_transformer_map(pp))

    def show_transformer_file_map(self) -> None:
        """Log the files of the transformer on each tensor and pipeline rank."""
        for tp in range(self.tp_degree):
            for pp in range(self.pp_degree):
                files = [self._layer_file(layer, tp) for layer in self.get_pp_transformer_map(pp)]
                logger.info("(%d, %d) = %s", tp, pp, files)

    def show_tp_embedding_map(self) -> None:
        """Log the file of the embedding on each tensor rank."""
        for tp in range(self.tp_degree if self.layer_keys else 0):
            logger.info("%d = %s", tp, self.get_embedding_files(tp))

    def show_tp_final_norm_map(self) -> None:
        """Log the file of the final norm on each tensor rank."""
        for tp in range(self.tp_degree if self.layer_keys else 0):
            logger.info("%d = %s", tp, self.get_final_norm_files(tp))

    def _check_layers(self) -> None:
        assert self.layer_keys, (f"{self.dir}: holds no {constants.LAYER_FILE_PREFIX}* files, which a pipeline saves; read "
                                 f"the model by get_2d_parallel_state")

    def _layer_file(self, layer: str, tp_index: int) -> str:
        assert tp_index < self.tp_degree, f"tp_index: got {tp_index}; there are {self.tp_degree} tensor ranks"
        return [path for path in self.layer_files if _layer(path) == layer][tp_index]


def _layer(path: str) -> str:
    found = _LAYER.match(os.path.basename(path))
    assert found is not None, f"{path}: the name tells no layer"
    return found[0]


def _merged(files: list[str]) -> State:
    found: State | None = None
    for path in files:
        state = load_state(path)
        found = state if found is None else merge_state(found, state)
    assert found is not None
    return found
