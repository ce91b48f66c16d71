"""Questions to an installation: whatever is broken is a finding."""

import threading
import tomllib

from harness.cli.installation.probes import EXTRAS, ask_all
from harness.machine.findings import Finding, Level
from tests.checkout import ROOT


def test_a_probe_that_hangs_or_breaks_is_a_finding():
    """The others are told all the same."""
    never = threading.Event()

    def hang() -> list[Finding]:
        never.wait()
        return []

    def fall_over() -> list[Finding]:
        raise OSError("no such device")

    fine = [Finding("fine", Level.OK, "as it should be")]
    found = ask_all({"hung": hang, "fine": lambda: fine, "broken": fall_over}, deadline_s=1.0)
    never.set()

    assert [(each.check, each.level) for each in found] == [("hung", "warn"), ("fine", "ok"), ("broken", "fail")]
    assert "no such device" in found[2].found


def test_every_extra_has_a_purpose():
    """Less those for people who change the harness and its documentation."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    assert set(EXTRAS) == set(declared) - {"dev", "docs"}
