"""The rules of the house that a machine can check: which way imports point, how long things are, where what is done.

Each rule is a function from a file to what is wrong with it, so that it can be shown to find what it looks for.
"""

from __future__ import annotations

import ast
import importlib
import io
import pkgutil
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shoal"
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS: dict[str, tuple[str, ...]] = {
    "ground": ("version", "errors", "interrupts", "log", "nested"),
    "configuration": ("config",),
    "names": ("registry", "discovery", "cut", "fingerprint", "topology"),
    "machine": ("board", "halves", "memory_left", "native", "process_memory", "reduction"),
    "compression": ("signs",),
    "record": ("recording",),
    "tiers": ("tier",),
    "neighbours": ("neighbours",),
    "transport": ("collectives", "distributed"),
    "tables": ("embeddings", "frozen", "row_tables"),
    "rows": ("sparse_gradients",),
    "axes": ("comm", "mesh"),
    "holders": ("copies", "holders"),
    "precision": ("precision",),
    "sharding": ("zero",),
    "decisions": ("gradients", "lost"),
    "parts": ("checkpoint", "data", "optim", "pipeline", "placing", "schedule", "tensor_parallel"),
    "schema": ("schema",),
    "questions": ("chosen", "compression", "configured", "offload"),
    "translation": ("translate",),
    "engine's state": ("state_dict", "surface", "training_state"),
    "saving": ("saving",),
    "controls": ("controls",),
    "arrangement": ("agreement", "arrange"),
    "engine": ("engine",),
    "pipeline's engine": ("staged",),
    "entry": ("entry",),
    "root": ("__init__",),
    "launch": ("launch", "testing"),
    "command": ("__main__",),
}
"""From the ground up. A module imports its own part and the layers below; parts of one layer do not know each other."""

UPWARD: dict[tuple[str, str], str] = {}
"""Imports that point upward all the same: (file, module) and the reason."""

LATER: dict[tuple[str, str], str] = {
    ("launch/run.py", "shoal.launch.agent"): "it imports torch, which may start threads: after the guardian has forked",
}
"""Imports in a function that would close a circle if they stood at the top, and the reason."""

LINES, TEST_LINES = 320, 400
LONG = {
    "src/shoal/collectives.py": "the two collectives of state, the few others, and the one way in which they fail",
    "src/shoal/optim/pipeline.py": "one stream of pieces, which the thread and its callers share",
    "src/shoal/staged.py": "what an engine does otherwise where its model is in stages",
    "src/shoal/zero/unit.py": "the life of a unit, of which each phase needs the others' state",
    "tests/engine/test_step_in_backward.py": "one refusal after the other of one option",
    "tests/config/test_config_schema.py": "one case after the other of one mechanism, the whole configuration",
}
"""Files that are longer than others of their kind, and why they are not two."""

BODY = 40
"""The most lines of a function, without its docstring."""

ZERO_CODE = 2068
ZERO_APART = ("estimate.py", "settings.py", "working.py")
"""Lines of code that the mechanism of all stages may take; the files apart are no part of it."""

ENVIRONMENT = ("launch/", "native/build.py", "distributed.py", "testing.py")
"""Where `os.environ` is read. (`discovery.py` reads the mapping that `distributed.py` hands it.)"""

COLLECTIVE_FILES = ("board.py", "collectives.py", "checkpoint/ranks.py", "comm.py", "distributed.py", "pipeline/wire.py",
                    "tensor_parallel/axis.py", "testing.py")
COLLECTIVES = frozenset({
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "allgather", "allreduce", "alltoall", "barrier",
    "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend",
    "monitored_barrier", "new_group", "recv", "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list",
})  # fmt: skip
GROUPS = ("dist", "distributed", "group", "_group", "WORLD")
"""The names under which torch.distributed and its groups are spoken to."""

PRINTS = {"zero/estimate.py": "DeepSpeed's published estimators print their table, and scripts call them for that"}


def sources() -> Iterator[Path]:
    """Yield every Python file of the repository."""
    for folder in ("src", "tests", "examples", "benchmarks", "docs"):
        yield from (ROOT / folder).rglob("*.py")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), path.name)


# Imports


@cache
def rank_of(part: str) -> tuple[int, str]:
    for height, (layer, parts) in enumerate(LAYERS.items()):
        if part in parts:
            return height, layer
    raise AssertionError(f"shoal/{part} is in no layer; give it one in LAYERS of {Path(__file__).name}")


def part_of(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def imports(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of shoal that a file imports anywhere: in functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "shoal")
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"line {node.lineno}: import by the whole name, shoal.…, not by dots")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shoal":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if is_module(whole) else str(node.module)


def is_module(name: str) -> bool:
    path = ROOT / "src" / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def upward_imports(name: str, tree: ast.Module) -> Iterator[str]:
    height, layer = rank_of(part_of(name))
    for module in imports(tree):
        part = module.split(".")[1] if "." in module else "__init__"
        below, other = rank_of(part)
        if part != part_of(name) and below >= height and (name, module) not in UPWARD:
            yield (f"shoal/{name} ({layer}) imports {module} ({other}), which does not lie below it: move what it needs "
                   f"down, or pass it in")


def test_imports_point_one_way() -> None:
    found = [fault for path in FILES for fault in upward_imports(name_of(path), tree_of(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("name", "source"), [
    ("zero/unit.py", "from shoal.engine import Engine"),
    ("zero/unit.py", "def later():\n    from shoal.optim import Lion"),
    ("zero/unit.py", "if TYPE_CHECKING:\n    from shoal import schema"),
    ("data/order.py", "import shoal.checkpoint"),
    ("errors.py", "import shoal"),
])  # fmt: skip
def test_an_import_that_points_upward_or_sideways_is_found(name: str, source: str) -> None:
    assert len(list(upward_imports(name, ast.parse(source)))) == 1


def test_the_tables_of_imports_have_no_dead_rows() -> None:
    assert {part for parts in LAYERS.values() for part in parts} == {part_of(name_of(path)) for path in FILES}
    used = {(name_of(path), module) for path in FILES for module in imports(tree_of(path))}
    assert used >= set(UPWARD) | set(LATER)


def test_no_modules_import_each_other() -> None:
    graph = {module_of(path): {module for module in imports(tree_of(path)) if (name_of(path), module) not in LATER}
             for path in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" is imported by ".join(error.args[1]))


def test_building_an_engine_imports_nothing_that_it_may_not_need() -> None:
    code = "import sys, torch; before = set(sys.modules); import shoal.entry; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"matplotlib", "rich", "torch.distributed.elastic.agent", "torch.utils.data", "torch.utils.tensorboard"}
    assert heavy.isdisjoint(done.stdout.split())


# Size


def code_lines(source: str) -> int:
    """Count the lines that hold code: neither blank nor comment nor docstring."""
    strings = {line for node in ast.walk(ast.parse(source)) if is_docstring(node)
               for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    held = {line for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in quiet
            for line in range(token.start[0], token.end[0] + 1)}
    return len(held - strings)


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def long_functions(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            start = first.end_lineno if is_docstring(first) else node.lineno
            if (node.end_lineno or 0) - (start or 0) > BODY:
                yield f"{node.name} has {(node.end_lineno or 0) - (start or 0)} lines"


def test_code_lines_count_code_alone() -> None:
    assert code_lines('"""Law\nof two lines."""\n\n# why\nx = (1,\n     2)\n\n\ndef f():\n    """Say."""\n') == 3


def test_no_file_is_long_without_a_reason() -> None:
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in sources()}
    long = {name for name, count in lines.items() if count > (TEST_LINES if name.startswith("tests/") else LINES)}
    assert long == set(LONG), {name: lines[name] for name in long}


def test_no_function_is_long() -> None:
    assert [f"{name_of(path)}: {fault}" for path in FILES for fault in long_functions(tree_of(path))] == []


def test_one_mechanism_for_all_stages_stays_small() -> None:
    counted = {path.name: code_lines(path.read_text()) for path in (PACKAGE / "zero").glob("*.py")}
    total = sum(count for name, count in counted.items() if name not in ZERO_APART)
    assert total <= ZERO_CODE, f"zero/ has {total} lines of code, {counted}"


# Names


def test_public_names_are_sorted_and_there() -> None:
    assert shoal.__all__ == sorted(shoal.__all__)
    assert [name for name in shoal.__all__ if getattr(shoal, name, None) is None] == []
    assert dir(shoal) == shoal.__all__


@pytest.mark.parametrize("package", [info.name for info in pkgutil.iter_modules([str(PACKAGE)]) if info.ispkg])
def test_a_package_has_the_names_that_it_promises(package: str) -> None:
    module = importlib.import_module(f"shoal.{package}")
    promised: list[str] = vars(module).get("__all__", [])
    assert promised == sorted(promised)
    assert [name for name in promised if name not in vars(module)] == []


# Where what is done


def reads_environment(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        named = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv", "environb")
        brought = isinstance(node, ast.ImportFrom) and node.module == "os" and any("env" in a.name for a in node.names)
        if named or brought:
            yield f"line {node.lineno} reads the environment; only {', '.join(ENVIRONMENT)} may"


def calls_collectives(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in COLLECTIVES:
            receiver = node.func.value
            spoken = receiver.attr if isinstance(receiver, ast.Attribute) else getattr(receiver, "id", "")
            if spoken in GROUPS:
                yield f"line {node.lineno} calls {spoken}.{node.func.attr}; collectives go through shoal.collectives"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            for alias in node.names:
                if alias.name in COLLECTIVES:
                    yield f"line {node.lineno} imports {alias.name}; collectives go through shoal.collectives"


def prints(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"line {node.lineno} prints; log it, or return it to the command line"


def lacks_docstring(tree: ast.Module) -> Iterator[str]:
    if not (ast.get_docstring(tree) or "").strip():
        yield "the file does not say its law: it has no docstring"


RULES: list[tuple[Callable[[ast.Module], Iterator[str]], tuple[str, ...], str]] = [
    (reads_environment, ENVIRONMENT, "import os\nhome = os.environ['HOME']"),
    (calls_collectives, COLLECTIVE_FILES, "dist.all_reduce(x)"),
    (calls_collectives, COLLECTIVE_FILES, "self.group.send([x], 1, 2)"),
    (calls_collectives, COLLECTIVE_FILES, "from torch.distributed import broadcast"),
    (prints, ("launch/", *PRINTS), "print(1)"),
    (lacks_docstring, (), "x = 1"),
]
"""A rule, the files that it spares, and a source that breaks it."""


@pytest.mark.parametrize(("rule", "spared", "bad"), RULES, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_done_in_one_place_is_done_nowhere_else(rule: Callable[[ast.Module], Iterator[str]],
                                                        spared: tuple[str, ...], bad: str) -> None:
    assert len(list(rule(ast.parse(bad)))) == 1
    found = [f"shoal/{name_of(path)}: {fault}" for path in FILES if not name_of(path).startswith(spared)
             for fault in rule(tree_of(path))]
    assert not found, "\n".join(found)


def test_nothing_is_left_for_later_in_a_comment() -> None:
    words = ("TO" "DO", "FIX" "ME", "X" "XX", "HA" "CK")
    found = [f"{path.relative_to(ROOT)}:{number}" for path in sources()
             for number, line in enumerate(path.read_text().splitlines(), 1) if any(word in line for word in words)]
    assert found == []
