"""The trace of a step names files of the library and calls that cross from one to another, and leaves the forward out."""

from __future__ import annotations

from step_calls import outcome, step_calls

from shoal.testing import run_ranks


def test_a_step_is_traced_from_backward_to_the_end_of_step() -> None:
    found = run_ranks(2, step_calls, 2)[0]
    assert {"engine/engine.py", "zero/unit.py", "transport/collectives.py"} <= set(found["files"])
    for caller, callee, _ in found["calls"]:
        assert caller != callee and {caller, callee} <= set(found["files"])
    functions = {function for _, _, function in found["calls"]}
    assert "ShardedOptimizer.take_step" in functions and "Engine.forward" not in functions
    assert [target.measured for target in outcome(found, 2, 2).targets] == [len(found["files"]), len(found["calls"])]
