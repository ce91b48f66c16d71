"""A rollout that is interrupted continues later: its agents held at the gate, or begun anew on what is on record."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.engines.scripted import Script, ScriptedFault, ScriptStep
from harness.rollouts.agents.task import AgentTask
from harness.rollouts.control.abort_report import Keep
from harness.rollouts.control.engines import EngineInProcess
from harness.rollouts.control.pause import paused_rollout
from harness.samples.rollout import OutcomeKind
from harness.types import Json, SampleStatus
from tests.controllers.aborting import CALLING, PATIENT, Stage, as_agent, call, eventually, stage
from tests.session_servers.scripted import canned_server, http_answer

TEXTS = ("first answer", "second answer", "third answer")
PLAYED = tuple(ScriptStep(text=text) for text in TEXTS)
REST = (PLAYED[2], PLAYED[1])
"""For a session that begins with a continuation: it plays the last step, then the others."""
STOPS_IN_THE_SECOND = (PLAYED[0], ScriptStep(text=TEXTS[1], fault=ScriptedFault.HANG, fault_after=6), PLAYED[2])

THREE_TURNS_AS_PROGRAM = f"""
{CALLING}
for _ in range(3):
    turn()
with open(os.environ["HARNESS_RESULT_FILE"], "w") as file:
    json.dump({{"heard": [message["content"] for message in messages[1::2]], "pid": os.getpid()}}, file)
"""


async def three_turns(base_url: str, **_: Any) -> Json:
    """An agent with three questions; fails when one of them is refused."""
    messages: list[Json] = [{"role": "user", "content": "go"}]
    for _turn in range(3):
        answer = await call(base_url, messages)
        answer.raise_for_status()
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
    return {"heard": [message["content"] for message in messages[1::2]]}


AGENTS = pytest.mark.parametrize("agent", [three_turns, THREE_TURNS_AS_PROGRAM], ids=["function", "program"])


async def in_the_second_turn(staged: Stage) -> None:
    """The agent waits for its second answer."""
    await eventually(lambda: len(staged.engine.live) == 1 and staged.engine.played.total() == 2)


def is_exact(rollout: Any) -> bool:
    """One sample with everything that the agent heard, and no token sampled in vain or twice."""
    [sample] = rollout.samples
    last = rollout.session["turns"][-1]
    ledger = rollout.session["ledger"]
    return bool(
        sample.tokens.size == last["prompt_length"] + last["output_length"]
        and sample.status is SampleStatus.COMPLETED
        and ledger["generated"] == ledger["trained"] == int(sample.loss_mask.sum())
    )


@AGENTS
async def test_agents_are_kept_alive_across_a_pause(tmp_path: Path, agent: Any):
    """Held at the gate with a partial turn; afterwards the same agents continue, and notice nothing."""
    async with stage(tmp_path, *STOPS_IN_THE_SECOND) as staged:
        pending = staged.start(agent, metadata={"start_rollout_id": 3})
        await in_the_second_turn(staged)
        async with paused_rollout([staged.server.url], [EngineInProcess(staged.engine)], PATIENT) as pause:
            assert (staged.gate(), len(staged.engine.live), pending.done()) == ("paused", 0, False)
            staged.engine._script = Script(PLAYED)
        rollout = await pending

        assert (staged.gate(), staged.sessions()) == ("open", 0)
    assert (pause.problems, pause.turns_left) == ((), 0)
    assert rollout.outcome.kind is OutcomeKind.FINISHED
    assert rollout.agent_result is not None
    assert rollout.agent_result["heard"] == list(TEXTS)
    assert [turn["status"] for turn in rollout.session["turns"]] == ["completed"] * 3
    assert rollout.samples[0].metadata["start_rollout_id"] == 3
    assert is_exact(rollout)


@AGENTS
async def test_agents_begin_anew_on_what_is_on_record(tmp_path: Path, agent: Any):
    """Aborted and kept; a later rollout gets the answers again and continues in the middle of the second turn."""
    async with stage(tmp_path, *STOPS_IN_THE_SECOND) as staged:
        staged.start(agent)
        await in_the_second_turn(staged)
        report = await staged.abort(keep=Keep.SESSIONS, rollout_id=3)
        [cut_short] = report.rollouts
        assert (staged.gate(), staged.sessions()) == ("open", 1)

        staged.engine._script = Script(REST)
        start = report.partial_samples[0].metadata["start_rollout_id"]
        later = await staged.start(agent, resumes=cut_short.session_id, metadata={"start_rollout_id": start})
        assert (staged.sessions(), staged.engine.played[str(later.session_id)]) == (0, 1)
    assert cut_short.outcome.kind is OutcomeKind.DRAINED
    assert [sample.status for sample in report.partial_samples] == [SampleStatus.ABORTED]
    assert later.outcome.kind is OutcomeKind.FINISHED
    assert later.agent_result is not None
    assert later.agent_result["heard"] == list(TEXTS)
    assert later.samples[0].metadata["start_rollout_id"] == 3
    partial = report.partial_samples[0].tokens.tolist()
    assert later.samples[0].tokens.tolist()[: len(partial)] == partial
    assert cut_short.session["turns"][1]["output_length"] == 6
    assert is_exact(later)


async def test_a_rollout_that_is_cut_short_again_keeps_its_first_number(tmp_path: Path):
    """`start_rollout_id` is that of the rollout in which it began."""
    async with stage(tmp_path, *STOPS_IN_THE_SECOND) as staged:
        staged.start(three_turns)
        await in_the_second_turn(staged)
        first = await staged.abort(keep=Keep.SESSIONS, rollout_id=3)
        staged.pending.clear()
        staged.engine._script = Script((msgspec.structs.replace(REST[0], fault=ScriptedFault.HANG), REST[1]))
        metadata = {"start_rollout_id": first.partial_samples[0].metadata["start_rollout_id"]}
        staged.start(three_turns, resumes=first.rollouts[0].session_id, metadata=metadata)
        await eventually(lambda: len(staged.engine.live) == 1)
        second = await staged.abort(rollout_id=4)

        assert staged.sessions() == 0
    assert [sample.metadata["start_rollout_id"] for sample in second.partial_samples] == [3]


async def test_a_session_that_is_gone_cannot_be_resumed(tmp_path: Path):
    """The rollout says so and no agent is started."""
    async with stage(tmp_path) as staged:
        task = AgentTask(as_agent(three_turns), "go", tmp_path / "0", "m", resumes="0" * 32)
        rollout = await staged.manager.run(task)

    assert rollout.outcome.kind is OutcomeKind.NOT_STARTED
    assert "never created, or deleted" in rollout.outcome.detail


@pytest.mark.parametrize("kind", [RuntimeError, asyncio.CancelledError])
async def test_whatever_happens_in_a_pause_the_gate_opens(tmp_path: Path, kind: type[BaseException]):
    async with stage(tmp_path) as staged:
        with pytest.raises(kind):
            async with paused_rollout([staged.server.url], budget=PATIENT):
                raise kind("the training step failed")

        assert staged.gate() == "open"


class DeafWorker:
    """An engine that ends nothing."""

    name = "deaf"

    async def abort_all(self, *, deadline_s: float) -> None:
        """Does nothing."""


async def test_cancelling_a_pause_on_its_way_opens_the_gate(tmp_path: Path):
    """An engine that ends nothing keeps it from coming to a stand; nobody has to wait for that."""
    async with stage(tmp_path, *STOPS_IN_THE_SECOND) as staged:
        staged.start(three_turns)
        await in_the_second_turn(staged)

        async def pause() -> None:
            async with paused_rollout([staged.server.url], [DeafWorker()], PATIENT):
                pytest.fail("the engine still generates")

        pausing = asyncio.create_task(pause())
        await eventually(lambda: staged.gate() == "paused")
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing

        assert staged.gate() == "open"
        await staged.abort()


async def test_a_pause_says_what_did_not_stop(tmp_path: Path):
    """Servers that are gone, engines that end nothing, turns that are still being generated."""
    async with canned_server(http_answer(200, {})) as engine, stage(tmp_path, *STOPS_IN_THE_SECOND) as staged:
        staged.start(three_turns)
        await in_the_second_turn(staged)
        servers = [staged.server.url, "http://127.0.0.1:9"]
        async with paused_rollout(servers, [engine.url], replace(PATIENT, engines_s=0.3)) as pause:
            assert staged.gate() == "paused"

        assert staged.gate() == "open"
        await staged.abort()
    assert (pause.turns_left, pause.engines[0].error) == (1, None)
    assert [answer.error is None for answer in pause.paused] == [True, False]
    assert len(pause.problems) == 2
