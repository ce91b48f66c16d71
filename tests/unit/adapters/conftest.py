"""What tests of adapters share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.adapters.trainer_sessions import ADMIN_TOKEN_VARIABLE

STAND_INS = Path(__file__).parent / "stand_ins"


@pytest.fixture(name="admin_token", params=[None, "sekret"], ids=["open", "token"])
def _admin_token(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Of the session server, with and without one; the adapter finds it where its users put it."""
    token: str | None = request.param
    if token is not None:
        monkeypatch.setenv(ADMIN_TOKEN_VARIABLE, token)
    return token


@pytest.fixture(name="trainers")
def _trainers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`import miles` and its like find the stand-ins, for the time of the test."""
    monkeypatch.syspath_prepend(STAND_INS)
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] in ("miles", "slime", "areal", "verl")]:
        del sys.modules[name]
