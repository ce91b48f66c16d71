"""What tests of adapters share."""

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from harness.adapters.trainer_sessions import ADMIN_TOKEN_VARIABLE

STAND_INS = Path(__file__).parent / "stand_ins"
MILES_CHECKOUT = os.environ.get("HARNESS_MILES_SRC")
"""A checkout of miles at the commit of the adapter, whose facts and `Sample` are then looked at, too."""


@pytest.fixture(name="admin_token", params=[None, "sekret"], ids=["open", "token"])
def _admin_token(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Of the session server, with and without one; the adapter finds it where its users put it."""
    token: str | None = request.param
    if token is not None:
        monkeypatch.setenv(ADMIN_TOKEN_VARIABLE, token)
    return token


@pytest.fixture(name="trainers")
def _trainers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`import miles` and its like find the stand-ins, for the time of the test; `Sample` is that of a checkout."""
    monkeypatch.syspath_prepend(STAND_INS)
    if MILES_CHECKOUT is not None:
        name = "miles.utils.types"
        specification = spec_from_file_location(name, Path(MILES_CHECKOUT) / "miles/utils/types.py")
        assert specification is not None
        assert specification.loader is not None
        import_module("miles.utils")
        sys.modules[name] = module_from_spec(specification)
        specification.loader.exec_module(sys.modules[name])
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] in ("miles", "slime", "areal", "verl")]:
        del sys.modules[name]
