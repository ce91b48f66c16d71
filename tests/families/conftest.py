"""The model families: each loaded once per process. With CI=true a family that cannot be fetched is a failure."""

import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from harness.models import resolve_model
from tests.families.family import Family
from tests.families.packages import SHA512, fetch_tokenizer

SMOLLM2 = "smollm2"


@cache
def load(name: str) -> Family:
    """The family `name`."""
    folder = resolve_model("smollm2-135m-instruct") if name == SMOLLM2 else fetch_tokenizer(name)
    return Family.open(name, folder)


def each_family(name: str) -> object:
    """A parameter; tests of one family share a worker."""
    return pytest.param(name, marks=pytest.mark.xdist_group(name))


@pytest.fixture(name="family", params=[each_family(name) for name in (SMOLLM2, *SHA512)])
def _family(request: pytest.FixtureRequest) -> Family:
    try:
        return load(request.param)
    except (OSError, subprocess.SubprocessError) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{request.param} cannot be fetched: {error}")


@pytest.fixture(name="folder_of", scope="session")
def _folder_of() -> Callable[[str], Path]:
    return fetch_tokenizer
