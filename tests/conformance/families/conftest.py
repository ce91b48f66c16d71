"""The model families: each loaded once per process. With CI=true a family that cannot be fetched is a failure."""

import os
import subprocess

import pytest

from tests.conformance.families.family import NAMES, Family, load


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
