"""The late device is built once; where it cannot be, its tests skip with the reason."""

import pytest

from tests.late.build import NoCompiler, build


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    try:
        build()
    except NoCompiler as error:
        pytest.skip(str(error))
