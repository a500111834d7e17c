"""Where sequences are split and where not: norms and dropout outside the blocks train as in one process, or raise."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import shoal
from shoal.errors import RanksDisagree, ShoalError, UsageError
from shoal.tensor_parallel import Column, Dropout, Head, Kind, Norm, Plan, Row, Sequence, Vocabulary, Whole, parallelize
from shoal.testing import run_ranks

WIDTH, WORDS, LENGTH = 8, 11, 8


class Block(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    """A norm and dropout before the blocks, and after them."""

    def __init__(self, p: float = 0.0, *, inner: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.first, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(p)
        self.blocks = nn.ModuleList(Block(inner) for _ in range(2))
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Dropout(p)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.first(self.embed(tokens)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(self.norm(x)))


KINDS: dict[str, Kind] = {
    "embed": Vocabulary(), "blocks.0": Sequence(split="x"), "blocks.*.norm": Norm(), "blocks.*.up": Column(),
    "blocks.*.down": Row(), "blocks.*.drop": Dropout(), ".norm": Norm(gather_output=True), "head": Head(),
}  # fmt: skip
ENDS = Sequence(gather_output=True)
OTHERS: dict[str, dict[str, Kind | None]] = {
    "right": {},
    "the blocks gather": {".norm": None, "blocks.1": ENDS},
    "gathered behind dropout": {".norm": Norm(), ".last": ENDS},
    "forgotten": {".norm": None, ".last": ENDS},
    "whole": {".norm": Whole(), ".last": ENDS},
    "too early": {".first": Norm()},
    "too late": {".norm": Norm(), "blocks.1": ENDS},
    "dropped too early": {".drop": Dropout()},
    "dropped too late": {".last": Dropout()},
    "endless": {".norm": Norm()},
    "never split": {"blocks.0": None},
    "dropout forgotten": {"blocks.*.drop": None},
}
"""Kinds by pattern, which add to `KINDS` or replace them."""


def plan(case: str) -> Plan:
    return Plan({name: kind for name, kind in {**KINDS, **OTHERS[case]}.items() if kind is not None}, sequence_dim=1)


def trained(case: str | None, zero: int = 0, p: float = 0.0) -> dict[str, Tensor] | None:
    """Take an SGD step, over tensor ranks with the plan of a case or in one process; return the weights."""
    torch.manual_seed(1)
    model, mesh = Model(p), shoal.Mesh(tensor=dist.get_world_size())
    if case is not None:
        parallelize(model, mesh.group("tensor"), plan(case))
    engine, *_ = shoal.initialize(model=model, mpu=mesh, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0, "timeout": 30,
        "zero_optimization": {"stage": zero}, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}})
    for number in range(2):
        tokens = torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(number))
        engine.backward(functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten()))
        engine.step()
    return engine.consolidated_state_dict(torch.float32)


@pytest.mark.parametrize(("case", "zero"), [("right", 0), ("right", 3), ("the blocks gather", 1),
                                            ("gathered behind dropout", 0)])
def test_norms_outside_the_blocks_get_the_gradients_of_one_process(case: str, zero: int) -> None:
    found, wanted = run_ranks(2, trained, case, zero)[0], run_ranks(1, trained, None)[0]
    assert found is not None and wanted is not None
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, msg=name)


def test_dropout_outside_the_split_sequences_is_that_of_one_process() -> None:
    """Ranks drop the same elements of a whole tensor, with the draws of one process."""
    found, wanted = run_ranks(2, trained, "the blocks gather", 0, 0.3)[0], run_ranks(1, trained, None, 0, 0.3)[0]
    assert found is not None and wanted is not None
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, msg=name)


def refused(case: str) -> str:
    with pytest.raises(ShoalError) as caught:
        trained(case, p=0.3 if "dropped" in case else 0.0)
    assert isinstance(caught.value, RanksDisagree if case in ("forgotten", "whole") else UsageError)
    return str(caught.value)


@pytest.mark.parametrize(("case", "words"), [
    ("forgotten", "'norm.weight' is whole on all tensor ranks, and has another gradient on rank 1 of them than on rank 0"),
    ("whole", "if it runs on a part of the sequence, say Norm() of its module in the plan"),
    ("too early", "first: Norm() where sequences are not split: each of 2 ranks has the whole gradient of"),
    ("too late", "norm: Norm() where sequences are not split: each of 2 ranks has the whole gradient of"),
    ("dropped too early", "drop: Dropout() where sequences are not split: 2 ranks have the same values"),
    ("dropped too late", "last: Dropout() where sequences are not split: 2 ranks have the same values"),
    ("endless", "sequences are split at 'blocks.0', and nothing gathers them: say Norm(gather_output=True) of the norm"),
    ("never split", "sequences are gathered behind '.norm', and nothing splits them: say Sequence(split=ARGUMENT)"),
])
def test_wrong_gradients_are_named_at_the_first_step(case: str, words: str) -> None:
    for said in run_ranks(2, refused, case):
        assert words in said


def forgotten() -> str:
    with pytest.raises(UsageError) as caught:
        parallelize(Model(inner=0.1), shoal.Mesh(tensor=1).group("tensor"), plan("dropout forgotten"))
    parallelize(Model(), shoal.Mesh(tensor=1).group("tensor"), plan("dropout forgotten"))  # it drops nothing
    return str(caught.value)


def test_dropout_in_a_split_sequence_must_be_matched() -> None:
    assert run_ranks(1, forgotten)[0].splitlines()[1:] == [
        "  no pattern matches blocks.*.drop (Dropout), 2 of them: it would drop alike from every part: say Dropout() where "
        "it runs between regions, or Region(dropout=True) around it"]
