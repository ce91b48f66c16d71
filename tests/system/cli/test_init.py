"""`harness init`: a scenario of one's own that runs before a word of it is changed."""

import json
from pathlib import Path

import pytest

from tests.harness_command import harness


@pytest.mark.agent
def test_a_scenario_of_ones_own_runs_as_it_is(tmp_path: Path):
    """Agent, check and script come along; one prompt is answered at once, the other one at the second attempt."""
    written = harness("init", "a folder/my-task", "--json", cwd=tmp_path)
    ended = harness("run", "a folder/my-task", "--out", "out", "--json", cwd=tmp_path)

    assert written.code == 0, written.stderr
    assert written.document["files"] == [
        "agent.py",
        "check.py",
        "scenario.schema.json",
        "scenario.toml",
        "script.schema.json",
        "script.toml",
    ]
    for kind in ("scenario", "script"):
        [named, *_] = (tmp_path / f"a folder/my-task/{kind}.toml").read_text().splitlines()
        schema = tmp_path / "a folder/my-task" / named.removeprefix("#:schema ")
        assert json.loads(schema.read_text()) == json.loads(harness("scenario", "schema", kind).stdout)
    assert ended.code == 0, ended.stderr
    [scenario] = ended.document["scenarios"]
    assert (scenario["name"], scenario["outcomes"]) == ("my-task", {"finished": 4})
    assert [rollout["reward"] for rollout in scenario["rollouts"]] == [1.0, 1.0, 0.5, 0.5]
    assert "answer: 4" in (tmp_path / "out/sessions/2/agent.log").read_text()


def test_nothing_that_is_there_is_touched(tmp_path: Path):
    """The folder one stands in is taken when it is empty; a name that no scenario can have stays `starter`."""
    folder = tmp_path / "My Task"
    folder.mkdir()
    first = harness("init", cwd=folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    again = harness("init", folder)
    on_a_file = harness("init", folder / "agent.py")

    assert first.code == 0, first.stderr
    assert b'name = "starter"' in before["scenario.toml"]
    assert (again.code, on_a_file.code) == (4, 4)
    assert "is not empty: choose another folder" in again.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
