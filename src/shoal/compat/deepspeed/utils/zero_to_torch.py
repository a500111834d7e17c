"""The weights of a checkpoint as files of plain torch: the command and functions of `zero_to_fp32`."""

from shoal.compat.deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict as convert_zero_checkpoint_to_fp32_state_dict,
)
from shoal.compat.deepspeed.utils.zero_to_fp32 import main as main
