"""Learning-rate schedules under their published names."""

from __future__ import annotations

import argparse
from typing import Any

from shoal.schedule import LRRangeTest as LRRangeTest
from shoal.schedule import OneCycle as OneCycle
from shoal.schedule import WarmupCosineLR as WarmupCosineLR
from shoal.schedule import WarmupDecayLR as WarmupDecayLR
from shoal.schedule import WarmupLR as WarmupLR
from shoal.schedule import add_tuning_arguments as add_tuning_arguments
from shoal.schedule import get_config_from_args as get_config_from_args

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE = "lr_range_test_min_lr", "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE = "lr_range_test_step_size", "lr_range_test_staircase"
CYCLE_FIRST_STEP_SIZE, CYCLE_SECOND_STEP_SIZE = "cycle_first_step_size", "cycle_second_step_size"
CYCLE_FIRST_STAIR_COUNT, CYCLE_SECOND_STAIR_COUNT = "cycle_first_stair_count", "cycle_second_stair_count"
CYCLE_MIN_LR, CYCLE_MAX_LR, CYCLE_MIN_MOM, CYCLE_MAX_MOM = "cycle_min_lr", "cycle_max_lr", "cycle_min_mom", "cycle_max_mom"
DECAY_STEP_SIZE, DECAY_LR_RATE, DECAY_MOM_RATE = "decay_step_size", "decay_lr_rate", "decay_mom_rate"
WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS = "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"
WARMUP_TYPE, WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "warmup_type", "log", "linear"
WARMUP_MIN_RATIO, COS_MIN_RATIO, TOTAL_NUM_STEPS = "warmup_min_ratio", "cos_min_ratio", "total_num_steps"


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse the flags of `add_tuning_arguments` from the command line; return them, and the other words."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def override_params(args: Any, params: dict[str, Any]) -> None:
    """Replace entries of `params` by the flags that were given."""
    params.update({key: value for key, value in vars(args).items() if key in params and value is not None})


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """Return the learning rate that a section `scheduler` begins or ends with, and '', or None and what is missing."""
    if "type" not in config or "params" not in config:
        return None, "the section needs type and params"
    keys = {LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR, ONE_CYCLE: CYCLE_MAX_LR}
    if config["type"] not in VALID_LR_SCHEDULES:
        return None, f"{config['type']} is no built-in schedule; choose {', '.join(VALID_LR_SCHEDULES)}"
    return config["params"].get(keys.get(config["type"], WARMUP_MAX_LR)), ""
