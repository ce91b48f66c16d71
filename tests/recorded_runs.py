"""Run directories as a run leaves them, of conversations with a real session server and a scripted engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.errors import Cause
from harness.samples.rollout import OutcomeKind
from harness.suite.record.config import Overrides, select
from harness.suite.record.rollout_table import RecordedSession, RolloutLog, RolloutRecord
from harness.suite.record.rundir import RunDirectory, note_engine, note_start
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json
from tests.builders import user
from tests.harness_command import write_scenario
from tests.session_servers.served import says, serving


def rollout_record(**values: Any) -> RolloutRecord:
    """A rollout that has finished, without a session, a reward or a sample."""
    defaults: dict[str, Any] = {
        "number": 0,
        "group": 0,
        "scenario": "small",
        "seed": 1,
        "session_id": None,
        "outcome": OutcomeKind.FINISHED,
        "cause": None,
        "detail": "",
        "agent_result": None,
        "reward": None,
        "score": {},
        "score_error": None,
        "session": RecordedSession(),
        "samples": [],
        "seconds": 1.0,
    }
    return RolloutRecord(**defaults | values)


async def write_run(path: Path, rollouts: Sequence[tuple[str, float | None]], *, seed: int = 0) -> RunDirectory:
    """A complete run of groups of two; of each rollout what the engine says in its two turns, and its reward.

    A rollout without a reward crashed.
    """
    folder = write_scenario(path.parent / "small")
    directory = RunDirectory.create(path, select(str(folder), Overrides()).config)
    records: list[Json] = []
    steps = says(*(said for text, _ in rollouts for said in ("One.", text)))
    async with serving(*steps, store=directory.database) as client:
        for number in range(len(rollouts)):
            session = await client.create()
            client.engine.play_from(session.session_id, 2 * number)
            first = await client.say(session, [user("Begin.")])
            await client.say(session, [user("Begin."), first, user("Go on.")])
            records.append(await client.record(session))
    with RolloutLog(directory.database) as log:
        for number, (record, (_, reward)) in enumerate(zip(records, rollouts, strict=True)):
            log.append(
                rollout_record(
                    number=number,
                    group=number // 2,
                    seed=seed + number,
                    session_id=record["session_id"],
                    outcome=OutcomeKind.CRASHED if reward is None else OutcomeKind.FINISHED,
                    cause=Cause.AGENT if reward is None else None,
                    reward=reward,
                    session=RecordedSession.of(record),
                )
            )
    tokenizer = path.parent / "toy"
    digests = {"scripted": {"tokenizer_digest": Tokenizer.load(tokenizer).digest}}
    directory.write_json(
        directory.lock, note_engine(note_start({"digests": digests}), "scripted", ["scripted"], tokenizer)
    )
    directory.write_json(directory.result, {"status": "passed", "exit_code": 0})
    return directory
