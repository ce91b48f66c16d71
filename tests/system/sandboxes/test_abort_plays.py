"""The plays `abort_*` with their agents in a box: the same outcomes and ledgers as without one, and nothing left.

`HARNESS_SOAK_BOXES=all` plays all six.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from harness.rollouts.sandboxes.spec import SandboxSpec
from tests.harness_command import harness
from tests.system.sandboxes.test_ends import processes_with
from tests.toy_model import write_toy_model

SETTLED = {"abort_network": (1776, {"invalid_reply"}), "abort_weight_update_pause": (888, set())}
"""Trained tokens and reasons of drops of the plays whose samples do not depend on the moment of a fault.

How much of an invalid reply has arrived when its connection breaks does.
"""
OUTCOMES = {
    "abort_network": [{"finished": 4}],
    "abort_weight_update_pause": [{"finished": 3}],
    "abort_end_of_rollout": [{"drained": 4, "finished": 4}],
    "abort_ten_drains": [{"drained": 20, "finished": 2}],
    "abort_agent_ignores": [{"drained": 6}],
    # Sessions beside the one in which the engine dies for good may have had all their turns.
    "abort_engine_dies": [{"finished": 6}, {"finished": 5, "engine_failed": 1}, {"finished": 4, "engine_failed": 2}],
}
PLAYS = sorted(OUTCOMES) if os.environ.get("HARNESS_SOAK_BOXES") == "all" else ["abort_network"]


def left_of(run: Path) -> list[str]:
    """Processes, mounts and containers that belong to the folder of a run."""
    listing = ("podman", "ps", "--all", "--format", '{{index .Labels "harness.rollout"}}')
    containers = subprocess.run(listing, capture_output=True, text=True, check=True, timeout=120).stdout.split()
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return [*processes_with(str(run)), *(line for line in (*containers, *mounts) if str(run) in line)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("play", PLAYS)
def test_a_play_ends_as_without_a_box(kind, spec_of, play, tmp_path):
    """Its checks hold, every fault reached its agent, engine and ledger agree."""
    spec: SandboxSpec = spec_of(kind)
    keys = spec.model_dump(exclude_defaults=True).items()
    words = [f"--set=agent.sandbox.{name}={json.dumps(value)}" for name, value in keys]
    run = tmp_path / "run"
    model = write_toy_model(tmp_path / "toy")
    ended = harness("run", play, "--model", model, "--out", run, "--json", *words, timeout_s=240)
    assert ended.code == 0, ended.stderr + ended.stdout
    [played] = ended.document["scenarios"]
    ledger = ended.document["ledger"]
    assert played["outcomes"] in OUTCOMES[play]
    assert [fault["action"] for fault in played["faults"] if not fault["fired"]] == []
    assert "0 agents" not in json.dumps(played["faults"])
    assert ledger["difference"] == 0
    if play in SETTLED:
        assert (ledger["trained"], {*ledger["dropped"]}) == SETTLED[play]
    assert left_of(run) == []
