"""A recorded session, served again without an engine: the same agent asks the same, another one is told where not."""

import asyncio
import json
import shutil
import signal
from pathlib import Path

import pytest

from harness.errors import RunError
from harness.server.store.sqlite import read_session
from harness.suite.record.rollout_table import read_rollouts
from harness.types import Turn
from harness.viewer.replay import AGENT, STORE, Replay, replay
from tests.harness_command import AGENT as PROGRAM
from tests.harness_command import harness, start_harness, wait, wait_for, write_scenario

pytestmark = pytest.mark.xdist_group("replay")  # played once, on one worker


@pytest.fixture(name="small", scope="module")
def _small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four sessions, two or three turns each, beside its scenario."""
    place = tmp_path_factory.mktemp("small")
    assert harness("run", write_scenario(place / "small"), "--out", place / "run").code == 0
    return place / "run"


def _replay(run: Path, name: str, place: Path, agent: Path | None = None) -> Replay:
    (place / AGENT).mkdir(parents=True)
    return asyncio.run(replay(run, name, place, agent=None if agent is None else str(agent), tokenizer=None))


def _agent(place: Path, **changes: str) -> Path:
    """The agent of the scenario with `changes` to its program."""
    program = PROGRAM.lstrip()
    for before, after in changes.items():
        assert before in program
        program = program.replace(before, after)
    path = place / "other.py"
    path.write_text(program)
    return path


@pytest.mark.agent
@pytest.mark.timeout(300)
def test_a_session_of_every_group_asks_for_the_same(tmp_path: Path):
    """Its requests say what the recorded ones said, and its turns have the recorded tokens."""
    run = tmp_path / "run"
    harness("run", "quickstart", "--engine", "scripted", "--limit", "2", "--out", run)
    rollouts = read_rollouts(run / "run.db")
    assert rollouts
    for number in range(0, len(rollouts), 2):
        rollout, place = rollouts[number], tmp_path / str(number)
        again = _replay(run, str(number), place)
        assert again.difference is None
        assert again.outcome == rollout.outcome
        assert _of(place / STORE, again.again) == _of(run / "run.db", rollout.session_id)


def _of(store: Path, session_id: str | None) -> list[tuple[object, ...]]:
    def facts(turn: Turn) -> tuple[object, ...]:
        tokens = turn.output_ids.tolist(), turn.logprobs.tolist(), turn.version_spans
        asked = turn.messages_delta, turn.sampling["asked"], turn.notes.dialect
        return asked, turn.prompt_digest, turn.end, *tokens

    assert session_id is not None
    return [facts(turn) for turn in read_session(store, session_id).turns]


def test_an_agent_that_says_something_else_is_stopped_there(small: Path, tmp_path: Path):
    """The turn, its message, and both texts; no answer is made up."""
    found = _replay(small, "2", tmp_path / "again", _agent(tmp_path, **{"Go on.": "Go elsewhere."}))

    assert found.served == [0]
    assert found.difference == "turn 3: messages[2].content is 'Go elsewhere.', recorded 'Go on.'"
    assert "engine_rejected" in (tmp_path / "again" / AGENT / "agent.log").read_text()


def test_an_agent_that_takes_no_refusal_for_an_end_is_ended(small: Path, tmp_path: Path):
    """Long before its deadline of a minute: nothing that it asks for is in the record any more."""
    stubborn = {
        "Go on.": "Go elsewhere.",
        "        if error.code == 404:\n            break\n        sys.exit(1)": "        time.sleep(0.1); continue",
    }
    found = _replay(small, "2", tmp_path / "again", _agent(tmp_path, **stubborn))

    assert found.served == [0]
    assert "Go elsewhere." in (found.difference or "")
    assert found.outcome == "drained"  # not timed out


def test_an_agent_that_asks_otherwise_is_stopped(small: Path, tmp_path: Path):
    """By how it wants to be answered, with the same words."""
    cut = _agent(tmp_path, **{'"messages": messages}': '"messages": messages, "max_tokens": 1}'})
    found = _replay(small, "0", tmp_path / "cut", cut)
    assert found.served == []
    assert "sampling is" in (found.difference or "")

    stops = _agent(tmp_path, **{'"messages": messages}': '"messages": messages, "stop": ["x"]}'})
    assert "stop" in (_replay(small, "0", tmp_path / "stops", stops).difference or "")


def test_an_agent_that_goes_on_or_ends_early_is_told(small: Path, tmp_path: Path):
    """What the record has no answer for, and the answer that nobody asked for."""
    longer = _replay(small, "0", tmp_path / "longer", _agent(tmp_path, **{'metadata.get("turns", 2)': "9"}))
    assert longer.served == [0, 1]
    assert longer.difference == "turn 2: the record has no further answer"

    shorter = _replay(small, "2", tmp_path / "shorter", _agent(tmp_path, **{'metadata.get("turns", 2)': "1"}))
    assert shorter.served == [0]
    assert shorter.difference == "the agent ended without asking for the rest"


MALFORMED = """
try:
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", b"{}", headers))
except urllib.error.HTTPError as error:
    print("refused:", error.code, flush=True)
"""


def test_requests_that_were_refused_are_compared(small: Path, tmp_path: Path):
    """An agent that asks badly, as it did then, asks for the same; one that did not, or no longer does, is told."""
    bad = _agent(tmp_path, **{"turns = 0\n": f"turns = 0\n{MALFORMED}"})
    then = tmp_path / "then" / "run"
    scenario = write_scenario(tmp_path / "then" / "bad", program=bad.read_text(), samples_per_prompt=1)
    assert harness("run", scenario, "--out", then).code == 0

    assert _replay(then, "0", tmp_path / "same").difference is None
    worse = _replay(small, "0", tmp_path / "worse", bad).difference
    assert worse == "the session server refused 1 of the agent's requests as invalid_request, and 0 of the record's"
    better = _replay(then, "0", tmp_path / "better", _agent(tmp_path)).difference
    assert better == "the session server refused 0 of the agent's requests as invalid_request, and 1 of the record's"


def test_the_command_says_how_it_went(small: Path, tmp_path: Path):
    """0 for the same, 1 with the first difference, 4 where there is nothing to replay; the run is left as it was."""
    before = (small / "run.db").read_bytes()
    same = harness("replay", small, "1", "--out", tmp_path / "kept", "--json")
    assert same.code == 0
    assert json.loads(same.stdout)["difference"] is None
    assert harness("show", tmp_path / "kept" / STORE).code == 0
    agent = _agent(tmp_path, **{"Go on.": "Stop."})
    other = harness("replay", small, "1", "--agent", agent.name, cwd=agent.parent)
    assert (other.code, "Stop." in other.stdout) == (1, True)
    for arguments in ([small, "9"], [tmp_path / "kept" / STORE, "0"], [small, "1", "--out", tmp_path / "kept"]):
        refused = harness("replay", *arguments)
        assert (refused.code, len(refused.stderr.splitlines())) == (4, 1)
    assert "not empty" in refused.stderr
    assert (small / "run.db").read_bytes() == before


def test_a_run_that_is_not_whole_is_refused_in_one_sentence(small: Path, tmp_path: Path):
    for name, error in (("config.toml", RunError), ("run.db", RunError)):
        run = tmp_path / name
        shutil.copytree(small, run)
        (run / name).unlink()
        with pytest.raises(error):
            _replay(run, "0", tmp_path / f"{name}-again")


def test_what_the_scenario_said_then_is_replayed(small: Path, tmp_path: Path):
    """Its prompts, limits and seed may have changed since; a text that only a file had must not."""
    moved = tmp_path / "moved"
    shutil.copytree(small, moved)
    changed = write_scenario(tmp_path / "small", seed=99, prompts=[{"text": "Else?"}], limits={"turns": 1})
    text = (moved / "config.toml").read_text()
    (moved / "config.toml").write_text(text.replace(str(small.parent / "small"), str(changed)))
    again = _replay(moved, "2", tmp_path / "moved-again")
    assert (again.difference, again.served) == (None, [0, 1, 2])

    (changed / "instruction.md").write_text("Say something else.")
    with pytest.raises(RunError, match=r"instruction\.md is not what it was"):
        _replay(moved, "2", tmp_path / "not-again")


def test_a_forced_script_must_be_that_of_the_run(small: Path, tmp_path: Path):
    """Its words were answers, and the run has but its digest."""
    forced = tmp_path / "forced"
    shutil.copytree(small, forced)
    now = write_scenario(tmp_path / "small", script={"steps": [{"text": "Another."}]})
    text = (forced / "config.toml").read_text().replace(str(small.parent / "small"), str(now))
    text = text.replace('name = "scripted"', 'name = "local"').replace("force_script = false", "force_script = true")
    (forced / "config.toml").write_text(text)

    with pytest.raises(RunError, match=r"script\.toml is not what it was"):
        _replay(forced, "0", tmp_path / "again")


def test_a_configuration_of_another_run_is_refused(small: Path, tmp_path: Path):
    """It has no such rollout, or another one at its number."""
    other = tmp_path / "other"
    shutil.copytree(small, other)
    text = (small / "config.toml").read_text()
    for before, now in (("samples_per_prompt = 2", "samples_per_prompt = 1"), ("seed = 3", "seed = 4")):
        assert before in text
        (other / "config.toml").write_text(text.replace(before, now))
        with pytest.raises(RunError, match="has no rollout 3"):
            _replay(other, "3", tmp_path / before)


def test_a_session_without_an_answer_is_not_replayed(tmp_path: Path):
    program = PROGRAM.lstrip().replace('metadata.get("turns", 2)', "0")
    run = tmp_path / "run"
    harness("run", write_scenario(tmp_path / "mute", program=program, check=None), "--out", run)
    with pytest.raises(RunError, match=r"no turn of .* has one"):
        _replay(run, "0", tmp_path / "again")


def test_a_turn_behind_a_cut_one_is_not_replayed(tmp_path: Path):
    """Where evaluation continues after a cut answer."""
    run, keys = tmp_path / "run", {"after_incomplete": "serve", "limits": {"tokens_per_turn": 1}}
    harness("run", write_scenario(tmp_path / "cut", program=PROGRAM.lstrip(), check=None, **keys), "--out", run)
    with pytest.raises(RunError, match=r"turn 1 of .* follows a cut one"):
        _replay(run, "0", tmp_path / "again")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_replay_that_is_stopped_leaves_nothing_behind(small: Path, tmp_path: Path, number: signal.Signals):
    """A service manager ends it as Ctrl+C does, in the middle of the agent's work."""
    here, kept = tmp_path / "here", tmp_path / "kept"
    kept.mkdir()
    agent = _agent(tmp_path, **{"turns = 0\n": f"pathlib.Path({str(here)!r}).touch(); time.sleep(60)\nturns = 0\n"})
    with start_harness("replay", small, "1", "--agent", agent, env={"TMPDIR": str(kept)}) as process:
        wait_for(here)
        process.send_signal(number)
        ended = wait(process)

    assert (ended.code, ended.stderr) == (2, "harness: interrupted\n")
    assert not list(kept.glob("harness-*"))
