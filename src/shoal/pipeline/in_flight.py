"""The passes in flight on a rank: whose activations it holds at each moment of a step, by its schedule.

A pass whose backward is split holds all its activations from I to W, because the products of its weight gradients need them.
"""

from __future__ import annotations

from shoal.activation import Moment
from shoal.pipeline.instruction import Op
from shoal.pipeline.schedules import PipelineSchedule

__all__ = ["moments"]


def moments(schedule: PipelineSchedule, rank: int) -> frozenset[Moment]:
    """Return the moments of a step of `rank`; their roots are the stages that it owns, in order."""
    stages = [stage for stage, owner in enumerate(schedule.owner) if owner == rank]
    resting, whole = [0] * len(stages), [0] * len(stages)
    found: set[Moment] = set()
    for instruction in schedule.rows[rank]:
        root = stages.index(instruction.stage)
        match instruction.kind:
            case Op.FORWARD:
                found.add(Moment(root, tuple(resting), tuple(whole)))
                resting[root] += 1
            case Op.BACKWARD:
                resting[root] -= 1
                found.add(Moment(root, tuple(resting), tuple(whole)))
            case Op.INPUT:
                resting[root] -= 1
                whole[root] += 1
                found.add(Moment(None, tuple(resting), tuple(whole)))
            case Op.WEIGHT:
                whole[root] -= 1
    return frozenset(found)
