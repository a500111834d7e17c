"""The same interpreter gives the same pairs: the first line of a function's docstring, and its source without the docstring.

They are read from the standard library's own sources. Whole modules are held out, chosen by a hash of their names, so that
no held-out function has a neighbour among those that are learned. A word is known by the hash of its letters, so a table
of embeddings may have as many rows as one asks for.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import re
import sysconfig
import tempfile
import warnings
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

SKIPPED_FOLDERS = frozenset({
    "site-packages", "dist-packages", "__pycache__",  # not the standard library
    "test", "tests", "idle_test", "lib2to3",  # inputs made to be odd
    "encodings", "pydoc_data",  # tables and prose
})

HELD_OUT_HASHES = 26
"""How many of the 256 values of a module name's hash mean held out: about a tenth of the modules."""

FEWEST_WORDS = 3
"""A first line of fewer words says too little to be looked for."""

QUERY, PASSAGE = 16, 64
"""Words that are read of a query and of a passage."""

NOTHING = 0
"""The row of the table that fills up a text that is shorter."""

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A function: what it says of itself, and what it does."""

    module: str
    query: str
    passage: str

    @property
    def held_out(self) -> bool:
        """Whether it is judged by; depends on its module alone."""
        return hashlib.sha256(self.module.encode()).digest()[0] < HELD_OUT_HASHES


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    train: list[Pair]
    held_out: list[Pair]


def prepare(cache: Path, library: Path | None = None) -> Corpus:
    """Return the pairs of `library` (default: this interpreter's standard library), writing them to `cache` on first use.

    Any number of processes may call this at once. Raises `FileNotFoundError` when `library` holds too few functions.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    path = cache / f"pairs-{platform.python_version()}-{hashlib.sha256(os.fsencode(library)).hexdigest()[:8]}.json"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache, suffix=".part", delete=False) as file:
            json.dump([asdict(pair) for pair in pairs(library)], file)
        Path(file.name).replace(path)
    found = [Pair(**facts) for facts in json.loads(path.read_text())]
    corpus = Corpus(train=[pair for pair in found if not pair.held_out], held_out=[pair for pair in found if pair.held_out])
    if not corpus.train or len(corpus.held_out) < 2:
        raise FileNotFoundError(f"{library} holds too few functions with docstrings ({len(found)}) to learn from and to "
                                f"judge by; is the standard library of this interpreter installed with its sources?")
    return corpus


def pairs(library: Path) -> Iterator[Pair]:
    """Yield the functions under `library` in the order of their paths and lines, each query once."""
    seen: set[str] = set()
    for path in sorted(library.rglob("*.py")):
        module = path.relative_to(library)
        generated = path.name.startswith("_sysconfigdata")  # a dump of one machine's build
        if generated or not SKIPPED_FOLDERS.isdisjoint(module.parts):
            continue
        try:
            functions = list(functions_of(path.read_text("utf-8")))
        except (SyntaxError, ValueError):  # made to be no Python, or no UTF-8
            continue
        for query, passage in functions:
            if len(words(query)) >= FEWEST_WORDS and query.lower() not in seen:
                seen.add(query.lower())
                yield Pair(module=module.as_posix(), query=query, passage=passage)


def functions_of(source: str) -> Iterator[tuple[str, str]]:
    """Yield the docstring's first line, and the source without the docstring, of each function that has both."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old escapes in other people's strings
        tree = ast.parse(source)
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1:
            said = (ast.get_docstring(node) or "").strip()
            docstring = node.body[0]
            if said:
                yield said.splitlines()[0], "\n".join([*lines[node.lineno - 1:docstring.lineno - 1],
                                                       *lines[docstring.end_lineno:node.end_lineno]])


def words(text: str) -> list[str]:
    """Split names and prose alike: `readLine_2` is read, line, 2."""
    return [word.lower() for word in WORD.findall(text)]


def row(word: str, rows: int) -> int:
    """Return the row of a word in a table of so many, the first of which stands for nothing."""
    return 1 + zlib.crc32(word.encode()) % (rows - 1)


def encode(text: str, length: int, rows: int) -> Tensor:
    """Return the rows of the first `length` words (length,), filled up with nothing."""
    found = [row(word, rows) for word in words(text)[:length]]
    return torch.tensor(found + [NOTHING] * (length - len(found)))


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """Pairs as rows of a table: queries (`QUERY`,) and passages (`PASSAGE`,)."""

    def __init__(self, found: Iterable[Pair], rows: int) -> None:
        both = [(encode(pair.query, QUERY, rows), encode(pair.passage, PASSAGE, rows)) for pair in found]
        self.queries, self.passages = (torch.stack(side) for side in zip(*both, strict=True))

    def __len__(self) -> int:
        return len(self.queries)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.queries[index], self.passages[index]
