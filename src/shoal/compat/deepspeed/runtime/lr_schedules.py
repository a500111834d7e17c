"""The learning-rate schedules under their published names."""

from shoal.schedule.cycle import LRRangeTest as LRRangeTest
from shoal.schedule.cycle import OneCycle as OneCycle
from shoal.schedule.registry import add_tuning_arguments as add_tuning_arguments
from shoal.schedule.registry import get_config_from_args as get_config_from_args
from shoal.schedule.warmup import WarmupCosineLR as WarmupCosineLR
from shoal.schedule.warmup import WarmupDecayLR as WarmupDecayLR
from shoal.schedule.warmup import WarmupLR as WarmupLR

LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
