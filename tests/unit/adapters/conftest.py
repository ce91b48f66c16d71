"""What tests of adapters share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

STAND_INS = Path(__file__).parent / "stand_ins"


@pytest.fixture(name="miles")
def _miles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`import miles` and `import slime` find the stand-ins, for the time of the test."""
    monkeypatch.syspath_prepend(STAND_INS)
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] in ("miles", "slime")]:
        del sys.modules[name]
