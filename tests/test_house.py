"""Structure rules that a machine can check: which way imports point, how long files are, one place per mechanism.

Each rule is a function from a file to what is wrong with it, so that it can be shown to find what it looks for.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shoal"
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS: dict[str, tuple[str, ...]] = {
    "ground": ("version", "errors", "interrupts", "log", "module_hooks", "tree"),
    "torch": ("autograd",),
    "device": ("device",),
    "configuration": ("config",),
    "names": ("products", "registry"),
    "machine": ("cluster", "native"),
    "formats": ("onebit",),
    "attention": ("attention",),
    "record": ("recording",),
    "transport": ("tier", "transport"),
    "mesh": ("activation", "comm", "mesh", "sparse"),
    "sequences": ("sequence_parallel",),
    "precision": ("precision",),
    "sharding": ("zero",),
    "capabilities": ("checkpoint", "data", "optim", "pipeline", "schedule"),
    "layers": ("interchange", "resilience", "tensor_parallel"),
    "modules": ("nn",),
    "engine": ("engine",),
    "planning": ("plan",),
    "root": ("__init__",),
    "published": ("compat",),
    "launch": ("launch", "testing"),
    "command": ("__main__",),
}
"""From the ground up. A module imports its own part and the layers below; parts of one layer do not know each other."""

LATER: dict[tuple[str, str], str] = {
    ("launch/run.py", "shoal.launch.agent"): "it imports torch, which may start threads: after the guardian has forked",
}
"""Imports in a function that would close a circle if they stood at the top, and the reason."""

LONG, TOO_LONG = 500, 700
"""Lines of a file: past the first it is printed for a reviewer, past the second it fails."""

ENVIRONMENT = ("compat/deepspeed/launcher/launcher_helper.py", "compat/environment.py", "compat/ranks_command.py", "launch/",
                "native/build.py", "transport/process_group.py", "testing.py")
"""Where `os.environ` is read. (`launcher_env.py` reads the mapping that `process_group.py` hands it.)"""

COLLECTIVE_FILES = ("transport/", "checkpoint/ranks.py", "comm.py", "compat/deepspeed/comm/comm.py", "pipeline/wire.py",
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

DEVICE_WORDS: dict[str, tuple[set[str], str]] = {
    "activation/checkpointing.py": ({"get_cuda_rng_tracker", "model_parallel_cuda_manual_seed"}, "published functions"),
    "checkpoint/rng.py": ({"cuda"}, "the key of the random state in checkpoints from before other kinds of devices"),
    "compat/deepspeed/accelerator/": ({"CUDAGraph", "CUDA_Accelerator", "CUDA_VISIBLE_DEVICES", "cuda", "cuda_accelerator"},
                                      "published classes and modules"),
    "compat/deepspeed/env_report.py": ({"CUDA of torch", "cuda"}, "a row of the published report"),
    "compat/deepspeed/launcher/multinode_runner.py": ({"MV2_CUDA_USE_NAIVE"}, "a published variable of MVAPICH"),
    "compat/deepspeed/launcher/runner.py": ({"CUDA_VISIBLE_DEVICES=%s is ignored"}, "a published variable"),
    "compat/deepspeed/ops/op_builder/builder.py": ({"cuda", "installed_cuda_version"}, "a published function"),
    "compat/deepspeed/runtime/activation_checkpointing/checkpointing.py": (
        {"CudaRNGStatesTracker", "_CUDA_RNG_STATE_TRACKER", "get_cuda_rng_tracker", "model_parallel_cuda_manual_seed"},
        "published names"),
    "compat/deepspeed/runtime/config.py": ({"enable_cuda_graph"}, "a published key"),
    "compat/deepspeed/runtime/fp16/onebit/": ({"cuda_aware", "cuda_aware and comm_backend_name"}, "a published parameter"),
    "compat/device_accelerator.py": ({"accelerator"}, "the published accelerator answers what torch's does"),
    "compat/ranks_command.py": ({"CUDA_VISIBLE_DEVICES"}, "a published variable"),
    "launch/agent.py": ({"CUDA_VISIBLE_DEVICES"}, "which GPUs ranks are near to, before torch is loaded"),
    "compat/tolerance.py": ({"captured as a CUDA graph"}, "what a published key means"),
    "config/blocks.py": ({"capture CUDA graphs", "enable_cuda_graph"}, "published keys"),
    "optim/registry.py": ({"cuda_aware"}, "a published parameter"),
    "zero/guard.py": ({"is_cuda"}, "an attribute of a tensor that may be read while it is released"),
    "zero/init.py": ({"cuda"}, "a published value of remote_device"),
}
"""Files beside device.py that name a kind of accelerator, the words or parts of texts that they may say, and the reason."""

NAMES_ITS_DEVICE = ("activation/", "attention/", "checkpoint/", "data/", "device.py", "engine/", "mesh/", "native/",
                    "optim/", "pipeline/", "precision/", "recording/", "resilience/", "sequence_parallel/", "sparse/",
                    "tensor_parallel/", "tier/", "transport/", "zero/")
"""Where tensors are made for the library itself: of the host, or of a device that is named."""
FACTORIES = frozenset({"arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand",
                       "randint", "randn", "randperm", "tensor", "zeros"})
"""Functions of torch whose result is where `torch.set_default_device` says, unless their call does."""
FLOAT_FACTORIES = frozenset({"as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace",
                             "normal", "ones", "rand", "randn", "scalar_tensor", "tensor", "zeros"})
"""Functions of torch whose result has the dtype that `torch.set_default_dtype` says, unless their call does."""

PRINTS = {"compat/deepspeed/env_report.py": "the command `ds_report`",
          "compat/deepspeed/launcher/runner.py": "the command `deepspeed`",
          "compat/deepspeed/utils/zero_to_fp32.py": "the command `zero_to_fp32.py`",
          "zero/memory_needs.py": "DeepSpeed's published estimators print their table, and scripts call them for that"}


def sources() -> Iterator[Path]:
    """Yield every Python file of the repository."""
    for folder in ("src", "tests", "examples", "benchmarks", "docs", "tools"):
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
        if part != part_of(name) and below >= height:
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
    assert used >= set(LATER)


def test_no_modules_import_each_other() -> None:
    graph = {module_of(path): {module for module in imports(tree_of(path)) if (name_of(path), module) not in LATER}
             for path in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" is imported by ".join(error.args[1]))


def test_an_agent_imports_no_pydantic() -> None:
    """An import of it is a tenth of the start of an agent, of which each host has one."""
    code = "import sys, shoal.launch.agent, shoal.launch.meeting; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_building_an_engine_imports_nothing_that_it_may_not_need() -> None:
    code = "import sys, torch; before = set(sys.modules); import shoal.engine.build; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"matplotlib", "rich", "torch.distributed.elastic.agent", "torch.utils.data", "torch.utils.tensorboard"}
    assert heavy.isdisjoint(done.stdout.split())


# Size


def test_no_file_is_too_long_to_review() -> None:
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in sources()}
    long = {name: count for name, count in lines.items() if count > LONG}
    print("\n".join(f"{name}: {count} lines; is it one idea?" for name, count in sorted(long.items())))
    assert [name for name, count in long.items() if count > TOO_LONG] == []


def test_few_files_lie_beside_the_packages() -> None:
    assert len([path for path in FILES if path.parent == PACKAGE]) <= 14


def test_the_maps_name_every_package_and_every_file_of_the_core() -> None:
    packages = {f"`{path.parent.name}/`" for path in PACKAGE.glob("*/__init__.py")}
    wanted = {"CONTRIBUTING.md": packages,
              "docs/architecture.md": packages | {f"`{path.name}`" for path in PACKAGE.glob("zero/[!_]*.py")},
              "docs/engine.md": {f"`engine/{path.name}`" for path in PACKAGE.glob("engine/[!_]*.py")}}
    assert {page: names for page, all_names in wanted.items()
            if (names := {name for name in all_names if name not in (ROOT / page).read_text()})} == {}


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


def classes(tree: ast.Module) -> Iterator[str]:
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def test_one_class_name_has_one_owner() -> None:
    owners: dict[str, list[str]] = {}
    for path in FILES:
        if name_of(path).startswith("compat/"):  # whose names are published ones, some of which are Shoal's as well
            continue
        for name in classes(tree_of(path)):
            owners.setdefault(name, []).append(name_of(path))
    assert {name: files for name, files in owners.items() if len(files) > 1} == {}


def test_a_test_name_has_at_most_70_characters() -> None:
    names = [node.name for path in (ROOT / "tests").rglob("test_*.py") for node in ast.walk(tree_of(path))
             if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert [name for name in names if len(name) > 70] == []


def assigned(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the targets of an assignment, tuples taken apart."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(
        node, ast.AugAssign | ast.AnnAssign) else []
    for target in targets:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def is_own(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")


def attributes(tree: ast.Module) -> set[str]:
    """Return the attributes that the classes of a file declare, or assign to themselves."""
    found: set[str] = set()
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        found |= {target.id for node in owner.body for target in assigned(node) if isinstance(target, ast.Name)}
        found |= {target.attr for node in ast.walk(owner) for target in assigned(node)
                  if isinstance(target, ast.Attribute) and is_own(target)}
        found |= {node.name for node in owner.body if isinstance(node, ast.FunctionDef)
                  and any(isinstance(each, ast.Name) and each.id == "cached_property" for each in node.decorator_list)}
    return found


WRITTEN_BY_OTHERS = {
    "ctx.": "torch's own: what an autograd function keeps between forward and backward",
    "parameter.data": "torch's own: the memory of a parameter",
    "buffer.data": "torch's own: the memory of a buffer",
    "witness.data": "torch's own: the memory of a tensor that only counts writes",
    "inner.state": "torch's own: the state of an optimizer that is handed over",
    "module.forward": "torch's own: the function that is compiled",
    "traffic.peer_memory_bytes": "a counter of `recording`, which every sender adds to",
    "traffic.recorder": "the record of collectives, which `comm` begins and ends",
    "progress.micro_steps": "a counter of an engine, which its accessors may set, as published",
    "progress.global_steps": "a counter of an engine, which its accessors may set, as published",
    "progress.global_samples": "a counter of an engine, which its accessors may set, as published",
    "progress.skipped_steps": "a counter of an engine, which its accessors may set, as published",
    "layer.body": "the module of a pipeline layer, which a tensor-parallel plan replaced",
    "built.body": "the module of a pipeline layer that is measured on another device",
}
"""Attributes that other files write, `receiver.attribute` or each of a `receiver.`, and why."""


def written_attributes(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield (receiver, attribute) of writes: `x.a = 1`, `setattr(x, "a", 1)`, `vars(x)["a"] = 1`, `x.__dict__["a"] = 1`."""
    for target in assigned(node):
        match target:
            case ast.Attribute(value=receiver, attr=name):
                yield receiver, name
            case ast.Subscript(value=ast.Call(func=ast.Name(id="vars"), args=[receiver]),
                               slice=ast.Constant(value=str(name))):
                yield receiver, name
            case ast.Subscript(value=ast.Attribute(value=receiver, attr="__dict__"), slice=ast.Constant(value=str(name))):
                yield receiver, name
            case _:
                pass
    match node:
        case ast.Call(func=ast.Name(id="setattr") | ast.Attribute(attr="__setattr__"),
                      args=[receiver, ast.Constant(value=str(name)), _]):
            yield receiver, name
        case _:
            pass


def foreign_writes(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Yield the writes to attributes in `known`, those of classes of the package, that no class of this file has."""
    own = attributes(tree)
    for node in ast.walk(tree):
        for receiver, attribute in written_attributes(node):
            name = receiver.attr if isinstance(receiver, ast.Attribute) else getattr(receiver, "id", "")
            if (attribute in known - own and name not in ("self", "cls")
                    and not WRITTEN_BY_OTHERS.keys() & {f"{name}.", f"{name}.{attribute}"}):
                yield f"line {node.lineno} writes {ast.unparse(receiver)}.{attribute}; call a method of its class"


def test_attributes_of_a_class_are_written_in_its_own_file() -> None:
    known = {name for path in FILES for name in attributes(tree_of(path))}
    assert [f"{name_of(path)}: {fault}" for path in FILES for fault in foreign_writes(tree_of(path), known)] == []


def test_a_write_to_the_attribute_of_another_files_class_is_found() -> None:
    known = {"pending", "micro_steps", "boundary_override"}
    source = ("unit.pending = None\nself.pending = 1\n"
              "self.progress.micro_steps = 1\nself.progress.boundary_override = True\nctx.pending = 1\n"
              "setattr(unit, 'pending', 1)\nvars(unit)['pending'] = 1\nunit.__dict__['pending'] = 1\n"
              "vars(self)['pending'] = 1")
    assert sorted(fault.split(";")[0] for fault in foreign_writes(ast.parse(source), known)) == [
        "line 1 writes unit.pending", "line 4 writes self.progress.boundary_override",
        "line 6 writes unit.pending", "line 7 writes unit.pending", "line 8 writes unit.pending"]


# One place per mechanism


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
                yield f"line {node.lineno} calls {spoken}.{node.func.attr}; use shoal.transport.collectives"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            for alias in node.names:
                if alias.name in COLLECTIVES:
                    yield f"line {node.lineno} imports {alias.name}; use shoal.transport.collectives"


def prints(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"line {node.lineno} prints; log it, or return it to the command line"


def compares_placements(tree: ast.Module) -> Iterator[str]:
    """Yield the imports of single placements: files that do not allocate what rests ask a row of the table."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "shoal.zero.placement":
            for name in {alias.name for alias in node.names} & {"PARTIAL", "REPLICATE", "SHARD", "Placement"}:
                yield f"line {node.lineno} imports {name}; ask a row, STAGES[stage].shards_weights"


def begins_with_what(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings that describe a thing by a question instead of its name."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))) if text.lstrip().startswith(("What ", "Who ")):
                yield f"line {node.lineno}: {text.strip().splitlines()[0]}"
            case _:
                pass


def lacks_docstring(tree: ast.Module) -> Iterator[str]:
    if not (ast.get_docstring(tree) or "").strip():
        yield "the file does not say its law: it has no docstring"


def names_devices(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the word where code names a kind of accelerator, or asks torch for one; docstrings do not count."""
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name("torch"), attr="accelerator" | "xpu" | "mps" | "get_device_module" as word):
                yield node.lineno, word
            case ast.Attribute(attr="is_xpu" | "is_mps" as word):
                yield node.lineno, word
            case ast.Constant(value=str(word)) if id(node) in documented:
                pass
            case (ast.Constant(value=str(word)) | ast.Name(word) | ast.Attribute(attr=word) | ast.arg(word)
                  | ast.keyword(word) | ast.FunctionDef(name=word) | ast.ClassDef(name=word) | ast.alias(word)
                  | ast.ImportFrom(word)) if "cuda" in (word or "").lower():
                yield node.lineno, str(word)


def foreign_device_words(name: str, tree: ast.Module) -> Iterator[str]:
    allowed = {part for file, (words, _) in DEVICE_WORDS.items() if name.startswith(file) for part in words}
    for line, word in names_devices(tree):
        if name != "device.py" and not any(part == word or (" " in word and part in word) or word.endswith(f".{part}")
                                           for part in allowed):
            yield f"line {line} names {word!r}: ask shoal/device.py, which answers for every kind of device"


def made_where_a_script_says(tree: ast.Module) -> Iterator[int]:
    """Yield the line of each call that makes a tensor and leaves its device to torch's default, which a script may set."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name), keywords=given) if name in FACTORIES:
                if not any(keyword.arg in ("device", None) for keyword in given):
                    yield node.lineno


def test_tensors_of_the_library_are_made_on_a_named_device() -> None:
    found = [f"shoal/{name_of(path)}: line {line}: add device=" for path in FILES
             if name_of(path).startswith(NAMES_ITS_DEVICE) for line in made_where_a_script_says(tree_of(path))]
    assert not found, "\n".join(found)
    source = "torch.zeros(2)\ntorch.zeros(2, device='cpu')\ntorch.zeros(2, **options)\nx.new_zeros(2)"
    assert list(made_where_a_script_says(ast.parse(source))) == [1]


def made_in_the_dtype_that_a_script_says(tree: ast.Module) -> Iterator[int]:
    """Yield the line of each call that makes a tensor and leaves its dtype to torch's default, which a script may set."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name), keywords=given) if name in FLOAT_FACTORIES:
                if not any(keyword.arg in ("dtype", "out", None) for keyword in given):
                    yield node.lineno


def test_tensors_of_the_library_are_made_in_a_named_dtype() -> None:
    found = [f"shoal/{name_of(path)}: line {line}: add dtype=" for path in FILES
             for line in made_in_the_dtype_that_a_script_says(tree_of(path))]
    assert not found, "\n".join(found)
    source = "torch.zeros(2)\ntorch.zeros(2, dtype=torch.int64)\ntorch.zeros(2, **options)\nx.new_zeros(2)\ntorch.arange(2)"
    assert list(made_in_the_dtype_that_a_script_says(ast.parse(source))) == [1]


def test_one_file_asks_which_accelerator_there_is() -> None:
    found = [f"shoal/{name_of(path)}: {fault}" for path in FILES
             for fault in foreign_device_words(name_of(path), tree_of(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("source", [
    "torch.cuda.synchronize()", "x.cuda()", "if x.is_cuda: pass", "device = 'cuda:0'", "torch.accelerator.synchronize()",
    "torch.xpu.synchronize()", "from torch.cuda import Event", "def to_cuda(): pass", "f(cuda=True)",
])  # fmt: skip
def test_a_file_that_names_a_kind_of_accelerator_is_found(source: str) -> None:
    assert list(foreign_device_words("zero/unit.py", ast.parse(source)))
    assert not list(foreign_device_words("device.py", ast.parse(source)))


def test_the_table_of_device_words_has_no_dead_rows() -> None:
    said = {path: [word for _, word in names_devices(tree_of(path))] for path in FILES}
    dead = [(file, part) for file, (parts, _) in DEVICE_WORDS.items() for part in parts
            if not any(part in word or f".{part}" in word for path, words in said.items() if name_of(path).startswith(file)
                       for word in words)]
    assert dead == []


RULES: list[tuple[Callable[[ast.Module], Iterator[str]], tuple[str, ...], str]] = [
    (reads_environment, ENVIRONMENT, "import os\nhome = os.environ['HOME']"),
    (calls_collectives, COLLECTIVE_FILES, "dist.all_reduce(x)"),
    (calls_collectives, COLLECTIVE_FILES, "self.group.send([x], 1, 2)"),
    (calls_collectives, COLLECTIVE_FILES, "from torch.distributed import broadcast"),
    (prints, ("launch/", *PRINTS), "print(1)"),
    (compares_placements, ("zero/",), "from shoal.zero.placement import SHARD"),
    (lacks_docstring, (), "x = 1"),
    (begins_with_what, (), "class Row:\n    '''What a row holds.'''"),
]
"""A rule, the files that it spares, and a source that breaks it."""


@pytest.mark.parametrize(("rule", "spared", "bad"), RULES, ids=lambda value: getattr(value, "__name__", ""))
def test_each_mechanism_has_one_place(
        rule: Callable[[ast.Module], Iterator[str]], spared: tuple[str, ...], bad: str) -> None:
    assert len(list(rule(ast.parse(bad)))) == 1
    found = [f"shoal/{name_of(path)}: {fault}" for path in FILES if not name_of(path).startswith(spared)
             for fault in rule(tree_of(path))]
    assert not found, "\n".join(found)


def test_nothing_is_left_for_later_in_a_comment() -> None:
    words = ("TO" "DO", "FIX" "ME", "X" "XX", "HA" "CK")
    found = [f"{path.relative_to(ROOT)}:{number}" for path in sources()
             for number, line in enumerate(path.read_text().splitlines(), 1) if any(word in line for word in words)]
    assert found == []


PEERS = {"deepspeed", "ray", "lightning", "trl", "peft", "accelerate", "intel_extension_for_pytorch"}
"""Packages of other environments, which scripts import there."""


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_scripts_import_modules_that_exist(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    siblings = {path.stem for each in ("benchmarks", "examples") for path in (ROOT / each).rglob("*.py")} | {"tests"}
    missing = [f"{path.relative_to(ROOT)}: {name}" for path in files for name in _imported(path)
               if name not in siblings | PEERS and find_spec(name) is None]
    assert not missing


def _imported(path: Path) -> set[str]:
    """Return the first names of what a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found
