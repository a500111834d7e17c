"""The difficulty of a curriculum by the number of steps, as published: scripts ask for it, and cut their samples to it.

    fixed_root        min + (max - min) (step / total)^(1 / root_degree), at most max; rounded down to a multiple of
                      difficulty_step, or up where that is below min. fixed_linear is its degree 1
    fixed_discrete    difficulty[i] up to step max_step[i], the last one after them
    custom            what the function given to `set_custom_get_difficulty` returns
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

from shoal.compat.raising import as_published
from shoal.errors import UsageError

__all__ = ["CurriculumScheduler"]

_NEEDS: Mapping[str, tuple[str, ...]] = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"), "custom": ()}


class CurriculumScheduler:
    """The difficulty of each step; `state` has the present one and the schedule."""

    @as_published
    def __init__(self, config: Mapping[str, Any]):
        """Take the section `curriculum_learning`. Raises UsageError for keys that are missing, RuntimeError for a type."""
        for key in ("min_difficulty", "max_difficulty", "schedule_type"):
            if key not in config:
                raise UsageError(f"curriculum: '{key}' is missing; give min_difficulty, max_difficulty and schedule_type")
        kind = config["schedule_type"]
        if kind not in _NEEDS:
            raise RuntimeError(f"curriculum: schedule_type: got {kind!r}; choose {', '.join(_NEEDS)}")
        schedule: Mapping[str, Any] = config["schedule_config"] if _NEEDS[kind] else {}
        for key in _NEEDS[kind]:
            if key not in schedule:
                raise UsageError(f"curriculum: schedule_config: '{key}' is missing; {kind} needs {', '.join(_NEEDS[kind])}")
        if kind == "fixed_discrete" and not 0 < len(schedule["difficulty"]) == len(schedule["max_step"]) + 1:
            raise UsageError(f"curriculum: schedule_config: got {len(schedule['difficulty'])} values of difficulty and "
                             f"{len(schedule['max_step'])} of max_step; the last difficulty has no max_step, the others one")
        self.state: dict[str, Any] = {
            "min_difficulty": config["min_difficulty"], "max_difficulty": config["max_difficulty"],
            "current_difficulty": config["min_difficulty"], "schedule_type": kind}
        if schedule:
            self.state["schedule_config"] = schedule
        self.custom_get_difficulty: Callable[[int], int] | None = None

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Take the function of a custom schedule: from the number of steps to the difficulty."""
        self.custom_get_difficulty = schedule_function

    @as_published
    def get_difficulty(self, global_steps: int) -> int:
        """Return the difficulty after `global_steps`. Raises UsageError for a custom schedule without its function."""
        schedule = self.state.get("schedule_config", {})
        match self.state["schedule_type"]:
            case "fixed_discrete":
                return schedule["difficulty"][bisect_left(schedule["max_step"], global_steps)]
            case "custom":
                if self.custom_get_difficulty is None:
                    raise UsageError("curriculum: the custom schedule has no function; call set_custom_get_difficulty first")
                return self.custom_get_difficulty(global_steps)
            case _:
                return self._of_root(global_steps, schedule)

    def update_difficulty(self, global_steps: int) -> int:
        """Set the present difficulty, unless the largest is reached, and return it."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.state["current_difficulty"]

    def get_current_difficulty(self) -> int:
        """Return the present difficulty."""
        return self.state["current_difficulty"]

    def set_current_difficulty(self, difficulty: int) -> None:
        """Set the present difficulty."""
        self.state["current_difficulty"] = difficulty

    def get_state(self) -> dict[str, Any]:
        """Return the state, for a checkpoint."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Take a state that `get_state` returned."""
        self.state = state

    def _of_root(self, steps: int, schedule: Mapping[str, Any]) -> int:
        least, most = self.state["min_difficulty"], self.state["max_difficulty"]
        share = (steps / schedule["total_curriculum_step"]) ** (1.0 / schedule.get("root_degree", 1))
        found = int(share * (most - least) + least)
        found -= found % schedule["difficulty_step"]
        return min(found if found >= least else found + schedule["difficulty_step"], most)
