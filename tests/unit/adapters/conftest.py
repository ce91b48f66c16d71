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
"""A checkout of miles at the commit of the adapter, whose facts and `OF_CHECKOUT` are then looked at, too."""
OF_CHECKOUT = (
    "miles.utils.types",
    "miles.utils.misc",
    "miles.ray.rollout.rollout_data_conversion",
    "miles.ray.rollout.train_data_conversion",
)
"""Modules that a checkout replaces: what becomes of samples. The others import an engine."""


@pytest.fixture(name="admin_token", params=[None, "sekret"], ids=["open", "token"])
def _admin_token(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Of the session server, with and without one; the adapter finds it where its users put it."""
    token: str | None = request.param
    if token is not None:
        monkeypatch.setenv(ADMIN_TOKEN_VARIABLE, token)
    return token


@pytest.fixture(name="trainers")
def _trainers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`import miles` and its like find the stand-ins, for the time of the test; some are those of a checkout."""
    monkeypatch.syspath_prepend(STAND_INS)
    if MILES_CHECKOUT is not None:
        for package in sorted(STAND_INS.glob("miles/**/__init__.py")):
            parts = package.parent.relative_to(STAND_INS).parts
            import_module(".".join(parts)).__path__.append(str(Path(MILES_CHECKOUT, *parts)))  # what has no stand-in
        for name in OF_CHECKOUT:
            path = Path(MILES_CHECKOUT, *name.split(".")).with_suffix(".py")
            specification = spec_from_file_location(name, path)
            assert specification is not None
            assert specification.loader is not None
            sys.modules[name] = module_from_spec(specification)
            specification.loader.exec_module(sys.modules[name])
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] in ("miles", "slime", "areal", "verl")]:
        del sys.modules[name]
