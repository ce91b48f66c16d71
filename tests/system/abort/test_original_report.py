"""What this project was started for: a turn is aborted in the middle of its decoding and the agent continues.

The turns after it look COMPLETED and can never be trained; one such session used to crash a training job.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.samples.codec import sample_from_json
from harness.samples.rollout import OutcomeKind
from harness.server.collecting import TRAILING_TURNS_DROPPED
from harness.server.settings import ServerSettings
from harness.turn_ends import TurnStatus
from harness.types import Json, SampleStatus
from tests.builders import user
from tests.controllers.aborting import CALLING, PATIENT, call, eventually, stage
from tests.logged import capture_logs
from tests.session_servers.served import serving

SIX_TURNS = tuple(
    ScriptStep(text=f"answer {number}", fault=ScriptedFault.ABORT if number == 2 else None, fault_after=4)
    for number in range(6)
)
HANGS_IN_THE_THIRD = tuple(
    ScriptStep(text=f"answer {number}", fault=ScriptedFault.HANG if number == 2 else None, fault_after=4)
    for number in range(6)
)
GIVES_UP_AT_ONCE = ServerSettings(max_unsolicited_aborts=0)

GOES_ON = f"""
{CALLING}
for _ in range(6):
    try:
        turn()
    except urllib.error.HTTPError as error:
        messages.extend([{{"role": "assistant", "content": "(no answer)"}}, {{"role": "user", "content": "more"}}])
"""


@pytest.fixture(name="logs")
def _logs() -> Iterator[list[Any]]:
    """Everything that is logged."""
    with capture_logs() as logs:
        yield logs


async def go_on(base_url: str, **_: Any) -> Json:
    """An agent that makes its six calls whatever it is answered."""
    messages: list[Json] = [user("go")]
    statuses = []
    for _turn in range(6):
        answer = await call(base_url, messages)
        statuses.append(answer.status_code)
        said = answer.json()["choices"][0]["message"] if answer.status_code == 200 else {"role": "assistant"}
        messages += [{"content": "(no answer)", **said}, user("more")]
    return {"statuses": statuses}


async def _six_turns(selection: str) -> tuple[list[Json], Json]:
    """Samples and record of a session whose third of six turns was aborted while its agent continued."""
    async with serving(*SIX_TURNS, settings=GIVES_UP_AT_ONCE) as client:
        session = await client.create(after_incomplete="serve", selection=selection)
        messages: list[Any] = [user("go")]
        for _turn in range(6):
            messages += [await client.say(session, messages), user("more")]
        return await client.samples(session), await client.record(session)


def _is_balanced(record: Json) -> bool:
    ledger = record["ledger"]
    return bool(ledger["generated"] == ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values()))


async def test_a_session_that_went_on_after_an_abort_is_one_sample_of_three_turns(logs: list[Any]):
    """ABORTED; the three turns after it are dropped, counted, stamped, and warned of."""
    [sample], record = await _six_turns("all")

    assert [turn["status"] for turn in record["turns"]] == [
        *[TurnStatus.COMPLETED] * 2,
        TurnStatus.ABORTED,
        *[TurnStatus.COMPLETED] * 3,
    ]
    third = record["turns"][2]
    assert (sample["status"], sample["metadata"]["turns"]) == (SampleStatus.ABORTED, [0, 1, 2])
    assert sample["metadata"]["dropped_trailing_turns"] == 3
    [warning] = [event for event in logs if event["event"] == TRAILING_TURNS_DROPPED]
    assert (warning["log_level"], warning["turns"]) == ("warning", 3)
    assert warning["session_id"] == record["session_id"][:8] + "…"
    assert sample["tokens"] == third["prompt_ids"] + third["output_ids"]
    assert record["ledger"]["trained"] == sum(sample["loss_mask"])
    assert record["ledger"]["dropped"] == {
        "after_incomplete": sum(len(turn["output_ids"]) for turn in record["turns"][3:])
    }
    assert _is_balanced(record)


@pytest.mark.parametrize(("agent", "selection"), [(go_on, "all"), (GOES_ON, "one")], ids=["function", "program"])
async def test_by_default_nothing_is_generated_in_vain(tmp_path: Path, agent: Any, selection: str):
    """Aborted in the third turn: whatever the agent asks afterwards is 404, and no engine hears of it."""
    async with stage(tmp_path, *HANGS_IN_THE_THIRD) as staged:
        staged.start(agent, session={"selection": selection})
        await eventually(lambda: len(staged.engine.live) == 1 and staged.engine.played.total() == 3)
        report = await staged.abort(PATIENT)

        assert staged.engine.played.total() == 3
        assert (staged.gate(), staged.sessions()) == ("open", 0)
    [rollout] = report.rollouts
    statuses = [turn["status"] for turn in rollout.session["turns"]]
    assert report.problems == ()
    assert rollout.outcome.kind is OutcomeKind.DRAINED
    assert statuses == ["completed", "completed", "aborted"]
    assert rollout.session["refusals"]["turn_aborted"] == 1
    assert sum(rollout.session["refusals"].values()) == 4
    assert report.partial_samples[-1].status is SampleStatus.ABORTED
    assert len(report.partial_samples) == 1
    assert not any("dropped_trailing_turns" in sample.metadata for sample in report.partial_samples)
    assert rollout.session["ledger"]["dropped"] == {}
    assert _is_balanced(rollout.session)


async def test_asking_again_for_an_aborted_turn_is_refused_and_samples_nothing():
    """An abort that nobody asked for ends the branch too: no engine hears of the same question again."""
    async with serving(*SIX_TURNS, settings=GIVES_UP_AT_ONCE) as client:
        session = await client.create()
        messages: list[Any] = [user("go")]
        for _turn in range(2):
            messages += [await client.say(session, messages), user("more")]
        answers = [await client.chat(session, messages) for _ in range(2)]
        [sample] = [sample_from_json(each) for each in await client.samples(session)]

        assert client.engine.played.total() == 3
    assert [answer.status_code for answer in answers] == [404, 404]
    assert (sample.status, sample.metadata["turns"]) == (SampleStatus.ABORTED, [0, 1, 2])
