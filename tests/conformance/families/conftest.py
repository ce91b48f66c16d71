"""The model families: each loaded once per process. With CI=true a family that cannot be fetched is a failure."""

import os
import subprocess

import pytest

from tests.conformance.families.family import NAMES, Family, load
from tests.conformance.families.official import official
from tests.conformance.families.sampling import plans


def each_family(name: str) -> object:
    """A parameter; tests of one family share a worker."""
    return pytest.param(name, marks=pytest.mark.xdist_group(name))


@pytest.fixture(name="family", params=[each_family(name) for name in NAMES])
def _family(request: pytest.FixtureRequest) -> Family:
    try:
        return load(request.param)
    except (OSError, subprocess.SubprocessError) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{request.param} cannot be fetched: {error}")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A worker of xdist has all tests of a family in one go, and keeps none of the tokenizers it is done with.

    What is known of a family holds its tokenizers, too.
    """
    if hasattr(item.config, "workerinput") and _family_of(item) not in (None, _family_of(nextitem)):
        for of_families in (load, official, plans):
            of_families.cache_clear()


def _family_of(item: pytest.Item | None) -> str | None:
    """The name of the family that `item` is about."""
    called_with = getattr(item, "callspec", None)
    return called_with.params.get("family") if called_with else None
