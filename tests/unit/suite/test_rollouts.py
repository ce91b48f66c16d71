"""Records of rollouts are durable one by one, and the last attempt is the one that counts."""

import sqlite3
import tracemalloc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from harness.errors import Cause, LedgerImbalance, StoreError
from harness.samples.codec import sample_to_json
from harness.samples.rollout import OutcomeKind
from harness.server.store.sqlite import SQLiteStore
from harness.sessions.ledger import Ledger, Unknown
from harness.sessions.session import Session
from harness.sessions.session_config import SessionConfig
from harness.suite.judge.accounting import account_run, ledger_of
from harness.suite.judge.witness import Witness
from harness.suite.record.rollout_table import RecordedSession, RolloutLog, RolloutRecord, read_rollouts
from harness.suite.run.report import RunReport, RunStatus, ScenarioReport
from harness.types import Json, UnknownOutput
from tests.builders import new_session, sample, take_turn, user
from tests.recorded_runs import rollout_record


def _record(**values: Any) -> RolloutRecord:
    facts = RecordedSession(turns=1, ledger=Ledger(5, 5))
    own = {"session_id": "a" * 32, "agent_result": {"turns": 1}, "reward": 0.5, "session": facts}
    return rollout_record(**own | values)


def test_samples_have_the_figures_and_the_reason_of_the_check():
    """And no key where it gave none; what the prompt says stays."""
    own = sample_to_json(sample(metadata={"topic": "colors"}))
    [judged] = _record(samples=[own], figures={"tests": 3.0}, reason="3 of 7 pass").export_samples()
    [half] = _record(samples=[own], reason="3 of 7 pass").export_samples()
    [plain] = _record(samples=[own]).export_samples()

    assert judged.metadata == {"topic": "colors", "score": {"figures": {"tests": 3.0}, "reason": "3 of 7 pass"}}
    assert half.metadata["score"] == {"reason": "3 of 7 pass"}
    assert plain.metadata == {"topic": "colors"}


def test_a_record_comes_back_as_it_was(tmp_path: Path):
    """For this process and for a tool that only reads."""
    record = _record(cause=Cause.AGENT, outcome=OutcomeKind.CRASHED)
    with RolloutLog(tmp_path / "run.db") as log:
        log.append(record)

        assert log.last_attempts() == {0: record}
    assert read_rollouts(tmp_path / "run.db") == {0: record}


async def test_only_its_owner_reads_the_database_of_a_run(tmp_path: Path):
    """The session store of the run is in the same file, with the keys of its sessions."""
    with RolloutLog(tmp_path / "run.db") as log:
        async with SQLiteStore(tmp_path / "run.db"):
            log.append(_record())
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("run.db*")}
    del modes["run.db-claim"]

    assert modes == {"run.db": 0o600, "run.db-wal": 0o600, "run.db-shm": 0o600}


def test_records_are_read_without_their_samples(tmp_path: Path):
    """They are read one rollout at a time when somebody looks at them: a run may be larger than memory."""
    large = {"text": "x" * 1_000_000}
    with RolloutLog(tmp_path / "run.db") as log:
        for number in range(20):
            log.append(_record(number=number, samples=[large]))
        tracemalloc.start()
        records = log.last_attempts()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        seen = sum(sample == large for record in records.values() for sample in record.samples)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    assert (seen, [len(record.samples) for record in records.values()]) == (20, [1] * 20)
    assert held < 1_000_000
    assert peak < 10_000_000


def test_the_last_attempt_counts(tmp_path: Path):
    with RolloutLog(tmp_path / "run.db") as log:
        log.append(_record(outcome=OutcomeKind.DRAINED, cause=Cause.LIMIT))
        log.append(_record(reward=1.0))

        assert log.last_attempts()[0].reward == 1.0
    with sqlite3.connect(tmp_path / "run.db") as connection:
        assert connection.execute("SELECT attempt, is_final FROM rollouts").fetchall() == [(0, 0), (1, 1)]
    connection.close()


@pytest.mark.parametrize(
    ("outcome", "cause", "is_final"),
    [
        (OutcomeKind.FINISHED, None, True),
        (OutcomeKind.CRASHED, Cause.AGENT, True),
        (OutcomeKind.TIMED_OUT, Cause.LIMIT, True),
        (OutcomeKind.NOT_STARTED, Cause.SCENARIO, True),
        (OutcomeKind.NOT_STARTED, Cause.HARNESS, False),
        (OutcomeKind.DRAINED, Cause.LIMIT, False),
        (OutcomeKind.ENGINE_FAILED, Cause.ENGINE, False),
        (OutcomeKind.HARNESS_FAILED, Cause.HARNESS, False),
        (OutcomeKind.SANDBOX_FAILED, Cause.HARNESS, False),
    ],
)
def test_what_is_nobodys_doing_runs_again(outcome: OutcomeKind, cause: Cause | None, is_final: bool):
    """Neither the model nor the agent caused it; its tokens are in no sample."""
    record = _record(outcome=outcome, cause=cause)

    assert record.is_final is is_final
    assert record.ledger == (Ledger(5, 5) if is_final else Ledger(5, dropped={"interrupted": 5}))


def test_a_database_of_no_run_is_a_clear_error(tmp_path: Path):
    (tmp_path / "run.db").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match=r"run\.db"):
        read_rollouts(tmp_path / "run.db")


def test_a_record_that_the_store_contradicts_is_a_bug(tmp_path: Path):
    """Its ledger counts tokens that no recorded turn has."""
    with RolloutLog(tmp_path / "run.db"), pytest.raises(LedgerImbalance, match="the store holds 0 sampled tokens"):
        account_run(tmp_path / "run.db", [_record()], [])


@pytest.mark.parametrize("in_flight", [1, 0])
async def test_tokens_that_came_after_the_record_are_undelivered(tmp_path: Path, in_flight: int):
    """They are accounted for where the record says that a turn was in flight; without one they are a bug."""
    session = new_session()
    async with SQLiteStore(tmp_path / "run.db") as store:
        await store.create(session)
        late = take_turn(session, [user("hi")])
        await store.commit(session.session_id, late)
    facts = RecordedSession(turns_in_flight=in_flight)
    records = [_record(session_id=session.session_id, session=facts)]

    with nullcontext() if in_flight else pytest.raises(LedgerImbalance, match="its ledger 0"):
        ledger = account_run(tmp_path / "run.db", records, [])
        tokens = late.output_ids.size
        assert ledger == Ledger(tokens, dropped={"undelivered": tokens})


async def test_a_run_counts_what_engines_did_not_hand_over(tmp_path: Path):
    """Of every session that the store holds, those of abandoned attempts too; a record that says more is a bug."""
    sessions = [Session(name, "", SessionConfig(), 0.0) for name in "ab"]
    lost = UnknownOutput("r", 9, "engine_connection_lost")
    async with SQLiteStore(tmp_path / "run.db") as store:
        for session in sessions:
            await store.create(session)
            await store.commit(
                session.session_id, structs.replace(take_turn(session, [user("hi")]), unknown=(lost, lost))
            )
    tokens = sessions[0].ledger().generated

    def record(requests: int) -> RolloutRecord:
        ledger = Ledger(tokens, tokens, unknown=Unknown(requests, 9 * requests))
        return _record(session_id="a", session=RecordedSession(turns=1, ledger=ledger))

    assert ledger_of(tmp_path / "run.db", [record(2)]).unknown == Unknown(4, 36)
    with pytest.raises(LedgerImbalance, match="as unknown"):
        ledger_of(tmp_path / "run.db", [record(5)])


def test_an_unbalanced_session_is_a_bug(tmp_path: Path):
    facts = RecordedSession(ledger=Ledger(5, 4))
    with RolloutLog(tmp_path / "run.db"), pytest.raises(LedgerImbalance, match="session 3"):
        account_run(tmp_path / "run.db", [_record(number=3, session=facts)], [])


def test_the_report_of_a_run_counts_lags_from_the_weights_that_were_live(tmp_path: Path):
    """Each sample from those under which it was read; one without a sampled token says nothing."""
    old, fresh = _sample([0, -1, 1], live=4), _sample([5, 5], live=5)
    records = [_record(samples=[old, _sample([-1])]), _record(number=1, samples=[fresh])]

    def telemetry_of(*records: RolloutRecord) -> Json:
        scenario = ScenarioReport("s", len(records), records, [])
        return RunReport(
            tmp_path,
            RunStatus.PASSED,
            [scenario],
            Ledger(),
            Witness.of([], Ledger()),
            3,
            has_parquet=False,
            seconds=1.0,
        ).telemetry

    both = telemetry_of(*records)
    assert (both["rollout/version_lag_min"], both["rollout/version_lag_max"]) == (0, 4)
    assert both["rollout/version_lag_mean"] == (4 + 3 + 0 + 0) / 4
    assert telemetry_of(records[0])["rollout/version_lag_min"] == 3


def _sample(versions: list[int], live: int | None = None) -> dict[str, Any]:
    metadata = {"staleness": "a prompt's own" if live is None else {"newest_version": live}}
    return {"behavior_versions": versions, "proximal_versions": versions, "metadata": metadata}
