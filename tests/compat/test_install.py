"""`import deepspeed` gives Shoal's tree: in one process, under `shoal run --as-deepspeed`, and through the wheel."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.deepspeed_wheel import build

from shoal.compat import distribution
from shoal.launch import cli

ROOT = Path(__file__).parents[2]

ASK = """
    import importlib.metadata as metadata, importlib.util, json, sys
    found = importlib.util.find_spec("deepspeed") is not None
    import deepspeed
    light = "torch" not in sys.modules
    import deepspeed.runtime.zero
    from deepspeed.accelerator.real_accelerator import get_accelerator
    import shoal.compat.deepspeed as home
    import shoal.compat.deepspeed.accelerator.real_accelerator as accelerator
    print(json.dumps({
        "found": found, "version": metadata.version("deepspeed"), "names": [
            each.metadata["Name"] for each in metadata.distributions(name="deepspeed")],
        "same": deepspeed is home and sys.modules["deepspeed.runtime.zero"] is home.runtime.zero,
        "function": get_accelerator is accelerator.get_accelerator, "light": light,
        "missing": importlib.util.find_spec("deepspeed.no_such_module") is None,
        "spec": deepspeed.__spec__.name, "own": deepspeed.__version__}))
"""
# "light": the import brings no torch, so that it costs little more than that of shoal.
EXPECTED = {"found": True, "version": distribution.VERSION, "names": ["deepspeed"], "same": True, "function": True,
            "missing": True, "light": True, "spec": "shoal.compat.deepspeed", "own": distribution.VERSION}


def run(code: str, python: str = sys.executable, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *options, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)


def answers(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_install_gives_the_tree_and_its_metadata_under_the_name() -> None:
    done = run("from shoal.compat import install; install(); install()" + textwrap.dedent(ASK))
    assert answers(done) == EXPECTED


def test_a_module_of_the_tree_runs_with_python_m() -> None:
    done = run("""
        import runpy, sys
        from shoal.compat import install
        install()
        sys.argv = ["launch"]
        module = runpy.run_module("deepspeed.utils.logging", run_name="not main")
        print(module["__spec__"].name)
    """)
    assert done.stdout.strip() == "deepspeed.utils.logging", done.stderr


def test_uninstall_takes_the_name_away_again() -> None:
    done = run("""
        import importlib.util
        from shoal.compat import install, uninstall
        install()
        import deepspeed.runtime.zero
        uninstall()
        print(importlib.util.find_spec("deepspeed"))
    """)
    assert done.stdout.strip() == "None", done.stderr


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A folder with a distribution named deepspeed that is not Shoal's."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text('__version__ = "0.16.0"\n')
    info = tmp_path / "deepspeed-0.16.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.16.0\n")
    return tmp_path


def test_install_warns_of_the_original_and_takes_its_place(original: Path) -> None:
    done = run(f"import sys; sys.path.insert(0, {str(original)!r})\nimport logging; logging.basicConfig()\n"
               "from shoal.compat import install; install()\n"
               "import deepspeed, importlib.metadata; print(deepspeed.__version__, importlib.metadata.version('deepspeed'))")
    assert done.stdout.split() == [distribution.VERSION] * 2, done.stderr
    assert "DeepSpeed 0.16.0 is installed in this environment" in done.stderr


def test_install_refuses_once_the_original_is_imported(original: Path) -> None:
    done = run(f"import sys; sys.path.insert(0, {str(original)!r})\nimport deepspeed\n"
               "from shoal.compat import install; install()")
    assert "DeepSpeed 0.16.0 is imported already" in done.stderr


def test_a_program_that_is_not_python_cannot_be_given_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--as-deepspeed", "--no-python", "true"]) == 2
    assert "install the wheel of `make deepspeed-wheel`" in capsys.readouterr().err


# The wheel


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The interpreter of a new environment that sees this one's packages, with the wheel installed."""
    folder = tmp_path_factory.mktemp("wheel")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    packages = next((folder / "venv" / "lib").glob("python*/site-packages"))
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "shared.pth").write_text("\n".join([str(ROOT / "src"), *ours, ""]))
    pip(str(python), "install", "--no-deps", "--no-index", str(build(folder)))
    yield str(python)


def pip(python: str, *words: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", python, "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_gives_the_tree_and_its_metadata(python: str) -> None:
    assert answers(run(ASK, python)) == EXPECTED


def test_the_wheel_satisfies_the_version_checks_of_clients(python: str) -> None:
    done = run("""
        from importlib.metadata import version
        from packaging.version import parse
        print(all(parse(version("deepspeed")) >= parse(each) for each in ("0.9.3", "0.14.5", "0.16.4", "0.18.2")))
    """, python)
    assert done.stdout.strip() == "True", done.stderr


def test_the_wheel_carries_the_commands(python: str) -> None:
    commands = Path(python).parent
    assert [name for name in distribution.COMMANDS if not (commands / name).exists()] == []
    done = subprocess.run([commands / "deepspeed", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--num_gpus" in done.stdout, done.stderr


def test_the_wheel_is_removed_without_a_trace(python: str) -> None:
    pip(python, "uninstall", "--yes", "deepspeed")
    packages = next((Path(python).parents[1] / "lib").glob("python*/site-packages"))
    assert [path.name for path in packages.iterdir() if "deepspeed" in path.name] == []
    assert [name for name in distribution.COMMANDS if (Path(python).parent / name).exists()] == []


def test_equal_sources_give_equal_wheels(tmp_path: Path) -> None:
    first, second = build(tmp_path / "1"), build(tmp_path / "2")
    assert first.read_bytes() == second.read_bytes()
    assert first.name.startswith(f"deepspeed-{distribution.VERSION}-")
