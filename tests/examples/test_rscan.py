"""Docstrings and sources: the same pairs every time, an AUC that is the share of pairs in order, and a run that learns."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "rscan"))

from charts import System, picture, table, text_picture
from data import NOTHING, QUERY, encode, functions_of, pairs, prepare, words
from judge import auc, drawn
from record import Point, Record
from towers import GROUP, TwoTowers, matching_loss

ROOT = Path(__file__).parents[2]
VERBS = ("read", "write", "close", "merge", "split", "sort", "count", "parse", "quote", "send")
SAID = ("fetch", "store", "finish", "join", "divide", "order", "tally", "understand", "protect", "deliver")
"""Names that docstrings use as synonyms, which a model has to learn."""
NOUNS = ("line", "token", "header", "socket", "folder", "record", "number", "letter", "buffer", "process")

SOURCE = '''
class Reader:
    def read_line(self, limit):
        """Read a line of at most limit bytes.

        More is said here.
        """
        return self.file.readline(limit)

    def close(self):
        """Close."""

async def sendAll(socket): "Send all bytes."; await socket.send()

def silent():
    return 0
'''


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small standard library: 60 modules of ten functions that say in other words what they do, and files to leave out."""
    root = tmp_path_factory.mktemp("library")
    (root / "package" / "test").mkdir(parents=True)
    for module in range(60):
        nouns = NOUNS[module % 10:] + NOUNS[:module % 10]
        (root / "package" / f"module{module:02}.py").write_text("\n".join(
            f'def {verb}_{noun}():\n    """{said.title()} what is given, kind {module}."""\n    return {noun}.{verb}()\n'
            for verb, said, noun in zip(VERBS, SAID, nouns, strict=True)))
    (root / "copy.py").write_text((root / "package" / "module07.py").read_text())
    (root / "latin.py").write_bytes('def f():\n    """Say café to all."""\n    return 1\n'.encode("latin-1"))
    (root / "broken.py").write_text("def f(:\n")
    (root / "package" / "test" / "test_module.py").write_text('def f():\n    """Test that all is well."""\n    return 1\n')
    return root


def test_a_function_gives_its_docstrings_first_line_and_its_bare_source() -> None:
    first, second = sorted(functions_of(SOURCE))
    assert first[0] == "Read a line of at most limit bytes." and second[0] == "Send all bytes."
    assert words(first[1]) == ["def", "read", "line", "self", "limit", "return", "self", "file", "readline", "limit"]
    assert "Send" not in second[1]


def test_names_and_prose_are_split_alike() -> None:
    assert words("readLine_2 HTTPServer is __init__") == ["read", "line", "2", "http", "server", "is", "init"]


def test_queries_are_new_and_of_modules_that_count(library: Path) -> None:
    found = list(pairs(library))
    assert len(found) == len({pair.query for pair in found}) == 600
    assert {pair.module for pair in found} == {"copy.py", *(f"package/module{n:02}.py" for n in range(60))} - {
        "package/module07.py"}


def test_two_preparations_give_the_same_pairs_and_the_first_is_kept(library: Path, tmp_path: Path) -> None:
    first, second = prepare(tmp_path / "a", library), prepare(tmp_path / "b", library)
    assert first == second
    (file,) = (tmp_path / "a").iterdir()
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored[:-1]))
    again = prepare(tmp_path / "a", library)
    assert len(again.train) + len(again.held_out) == len(stored) - 1


def test_no_module_is_in_both_halves(library: Path, tmp_path: Path) -> None:
    corpus = prepare(tmp_path, library)
    learned, held_out = ({pair.module for pair in half} for half in (corpus.train, corpus.held_out))
    assert learned and held_out and not learned & held_out
    assert len(corpus.train) + len(corpus.held_out) == 600


def test_a_library_without_functions_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"bare holds too few functions with docstrings \(0\)"):
        prepare(tmp_path / "cache", tmp_path / "bare")


@given(st.lists(st.sampled_from(VERBS), max_size=30), st.integers(2, 1000))
def test_a_text_is_rows_of_the_table_filled_up_with_nothing(said: list[str], rows: int) -> None:
    found = encode(" ".join(said), QUERY, rows).tolist()
    assert len(found) == QUERY
    assert all(0 < row < rows for row in found[:len(said)]) and set(found[len(said):]) <= {NOTHING}


scores = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12)


@given(scores, scores)
def test_the_auc_is_the_share_of_pairs_in_order_ties_counting_half(positives: list[float], negatives: list[float]) -> None:
    won = sum((p > n) + (p == n) / 2 for p in positives for n in negatives)
    assert auc(torch.tensor(positives), torch.tensor(negatives)) == pytest.approx(won / len(positives) / len(negatives))


def test_negatives_are_never_a_querys_own_passage_and_always_the_same() -> None:
    found = drawn(20)
    assert (found != torch.arange(20)[:, None]).all() and found.min() >= 0 and found.max() < 20
    assert torch.equal(found, drawn(20))


def test_what_fills_up_a_text_changes_nothing() -> None:
    torch.manual_seed(0)
    model = TwoTowers(rows=100, dim=8, hidden=8).eval()
    short = encode("read the line", 5, 100)[None]
    longer = torch.cat([short, torch.full((1, 9), NOTHING)], 1)
    torch.testing.assert_close(model.read(short), model.read(longer))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_table_with_sparse_gradients_learns_the_same(sparse: bool) -> None:
    torch.manual_seed(0)
    model = TwoTowers(rows=50, dim=4, hidden=4, sparse=sparse)
    texts = torch.randint(1, 50, (4, 6))
    matching_loss(*model(texts, texts.flip(1))).backward()
    gradient = model.table.weight.grad
    assert gradient is not None and gradient.is_sparse == sparse
    untouched = sorted(set(range(50)) - set(texts.flatten().tolist()))
    assert gradient.to_dense()[untouched].abs().sum() == 0 and gradient.to_dense().abs().sum() > 0


def test_a_batch_means_the_same_whoever_shares_it() -> None:
    torch.manual_seed(0)
    queries, passages = (torch.nn.functional.normalize(torch.randn(4 * GROUP, 8), dim=1) for _ in range(2))
    halves = [matching_loss(queries[part], passages[part]) for part in (slice(2 * GROUP), slice(2 * GROUP, None))]
    torch.testing.assert_close(matching_loss(queries, passages), sum(halves) / 2)
    with pytest.raises(ValueError, match=rf"microbatch of {GROUP + 1} pairs is no multiple of {GROUP}"):
        matching_loss(queries[:GROUP + 1], passages[:GROUP + 1])


def record(ranks: int, pace: float, seed: int = 0) -> Record:
    points = [Point(step=step, samples=100 * step, seconds=100 * step / pace, auc=0.5 + 0.1 * step + 0.01 * seed, loss=1.0)
              for step in range(5)]
    return Record(system=f"{ranks} ranks", ranks=ranks, seed=seed, bytes_per_step=2.5e6, points=points)


def test_a_record_says_when_the_target_was_reached_and_round_trips(tmp_path: Path) -> None:
    found = record(2, pace=50)
    assert found.seconds_to(0.85) == pytest.approx(7) and found.seconds_to(0.95) is None and found.seconds_to(0.4) == 0
    assert found.samples_per_second == pytest.approx(50) and found.auc_at(150) == pytest.approx(0.65)
    found.save(tmp_path / "record.json")
    assert Record.load(tmp_path / "record.json") == found


def test_systems_stand_side_by_side_in_a_table_and_two_pictures(tmp_path: Path) -> None:
    systems = [System(name="1 rank", records=[record(1, 20, seed) for seed in range(3)]),
               System(name="2 ranks, sparse", records=[record(2, 40, seed) for seed in range(3)])]
    console = Console(width=80, record=True, file=(tmp_path / "terminal.txt").open("w"))
    console.print(table(systems, 0.85, "RScan"))
    console.print(text_picture(systems, 0.85))
    said = console.export_text()
    console.file.close()
    assert "…" not in said, "a column does not fit in 80"
    slow, fast = ([word for word in line.split() if word] for line in said.splitlines() if "± " not in line and " ±" in line)
    assert slow[:2] == ["1", "rank"] and "0.610" in slow and "20" in slow and "0:17" in slow
    assert "40" in fast and "0:08" in fast and "0.910" in fast
    assert "1 rank" in said and "┄" in said and "AUC 0.85" in said
    files = [tmp_path / "auc.svg", tmp_path / "auc.png"]
    picture(files, systems, 0.85, "RScan")
    assert b"<svg" in files[0].read_bytes() and files[1].read_bytes().startswith(b"\x89PNG")


def test_a_target_that_some_seeds_never_reach_is_told() -> None:
    assert System(name="", records=[record(1, 20, seed) for seed in range(3)]).time_to(0.915) == "1 of 3 seeds"
    assert System(name="", records=[record(1, 20)]).time_to(0.99) == "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Steps on a small library by two ranks; then the last half of them once more, from the checkpoint between."""

    whole: Record
    again: Record
    said: str
    said_again: str


def train(folder: Path, library: Path, *options: str) -> str:
    command = [sys.executable, "-m", "shoal", "run", "--ranks", "2", str(ROOT / "examples/rscan/train.py"), "--shoal-config",
               "tiny.json", "--library", str(library), "--rows", "2000", "--steps", "24", "--every", "6", "--out", "run",
               "--cache", ".", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def runs(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("run")
    config = (ROOT / "examples/rscan/dense.json").read_text()
    (folder / "tiny.json").write_text(config.replace('"train_batch_size": 256', '"train_batch_size": 128'))
    said = train(folder, library, "--save-every", "12")
    whole = Record.load(folder / "run/record.json")
    (folder / "run/checkpoints/latest").write_text("global_step12")
    said_again = train(folder, library, "--resume")
    return Runs(whole=whole, again=Record.load(folder / "run/record.json"), said=said, said_again=said_again)


def test_it_learns_which_docstring_belongs_to_which_function(runs: Runs) -> None:
    first, *_, last = runs.whole.points
    assert last.auc > 0.7 and last.auc > first.auc + 0.1
    assert last.loss < runs.whole.points[1].loss
    assert [(point.step, point.samples) for point in runs.whole.points] == [(step, 128 * step) for step in range(0, 25, 6)]


def test_the_record_counts_what_a_rank_sends(runs: Runs) -> None:
    parameters = sum(parameter.numel() for parameter in TwoTowers(rows=2000).parameters())
    assert runs.whole.ranks == 2 and runs.whole.bytes_per_step == pytest.approx(4 * parameters, rel=0.01)


def test_a_resumed_run_repeats_what_the_first_one_did(runs: Runs) -> None:
    assert "step 12/24" in runs.said and "step 12/24" not in runs.said_again and "step 18/24" in runs.said_again
    again, whole = ([(p.step, p.auc, p.loss) for p in found.points[1:]] for found in (runs.again, runs.whole))
    assert again == whole


def test_the_momentum_mirrors_the_learning_rate_in_what_is_said(runs: Runs) -> None:
    rates, momenta = ([float(line.split(word)[1].split()[0]) for line in runs.said.splitlines() if "AUC" in line]
                      for word in ("lr ", "momentum "))
    assert rates[0] == min(rates[:4]) and max(rates) == rates[1] and min(momenta) == momenta[1]
