"""Every published name is where scripts import it from, with the published parameters; the page lists them all."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module

import pytest

import shoal.compat.deepspeed as deepspeed
from shoal.errors import NotSupportedYet

from .table import BETTER, FACTS, PAGE, REFUSED, find, page


def modules(package: object) -> list[str]:
    found: list[str] = []
    for info in pkgutil.walk_packages(vars(package)["__path__"], f"{vars(package)['__name__']}."):
        found.append(info.name)
    return found


def test_every_module_of_the_tree_imports_and_has_the_names_it_lists() -> None:
    for name in modules(deepspeed):
        module = import_module(name)
        for attribute in dir(module):
            getattr(module, attribute)


@pytest.mark.parametrize("module", FACTS)
def test_names_have_the_published_parameters(module: str) -> None:
    for name, parameters in FACTS[module].items():
        found = find(f"{module}.{name}")
        if parameters is not None:
            assert list(inspect.signature(found).parameters) == parameters, name  # pyright: ignore[reportArgumentType]


def test_refused_names_say_what_to_use_instead() -> None:
    for name in REFUSED:
        with pytest.raises(NotSupportedYet, match="not supported yet") as caught:
            find(name)()  # pyright: ignore[reportCallIssue]
        assert isinstance(caught.value, NotImplementedError)


def test_the_page_on_migrating_lists_what_the_tests_check() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.compat.table"


def test_names_that_do_more_are_published_ones() -> None:
    assert {name for name in BETTER if find(name) is None} == set()
