"""The quickstart of the README on the real model, looked at by somebody who does not trust the harness.

It is run by the commands that the README shows, from a wheel, and taken up again when it has ended. Nothing here
imports the code that produced the run: the database is read with sqlite3, samples with json, and the model is asked
again by a plain forward pass.
"""

import json
import sqlite3
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ground_truth import logprobs_of
from tests.shown_blocks import commands_on_path, is_quickstart_of_the_readme, shown_blocks

pytestmark = [pytest.mark.model, pytest.mark.agent, pytest.mark.timeout(1860), pytest.mark.xdist_group("quickstart")]

_RUN_S = 1800  # a model on a busy CPU


@dataclass(frozen=True)
class RecordedTurn:
    """A turn with its whole prompt, put together from the rows of the database alone."""

    session_id: str
    index: int
    parent: int | None
    prompt_ids: np.ndarray
    output_ids: np.ndarray
    logprobs: np.ndarray
    prompt_length: int
    prompt_digest: str


@pytest.fixture(scope="module", name="run_dir")
def _run_dir(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, installed_wheel: Path) -> Path:
    """The directory of the run that a reader of the README gets, on the model that the scenario names."""
    del model_dir  # fetched before: the run does not wait for it
    [block] = [text for page, text, _ in shown_blocks("sh") if is_quickstart_of_the_readme(page, text)]
    directory = tmp_path_factory.mktemp("quickstart")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=directory,
        env=commands_on_path() | {"PYTHONPATH": str(installed_wheel)},
        check=False,
        capture_output=True,
        text=True,
        timeout=_RUN_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "demo"


def test_a_finished_run_that_is_taken_up_again_is_the_same_run(run_dir: Path) -> None:
    """The README's last command: nothing is played a second time."""
    again, result = (json.loads(path.read_text()) for path in (run_dir.parent / "again.json", run_dir / "result.json"))

    assert again["scenarios"][0]["ledger"] == result["ledger"]


@pytest.fixture(scope="module", name="turns")
def _turns(run_dir: Path) -> list[RecordedTurn]:
    return list(_read_turns(run_dir / "run.db"))


@pytest.fixture(scope="module", name="samples")
def _samples(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def _read_turns(path: Path) -> Iterator[RecordedTurn]:
    ends: dict[tuple[str, int], np.ndarray] = {}
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    query = (
        "SELECT session_id, turn, parent, context_ids, output_ids, logprobs, prompt_length, prompt_digest"
        " FROM turns ORDER BY session_id, turn"
    )
    for session_id, turn, parent, context, output, logprobs, length, digest in database.execute(query):
        before = np.empty(0, np.int32) if parent is None else ends[session_id, parent]
        prompt = np.concatenate([before, np.frombuffer(context, "<i4")])
        output_ids = np.frombuffer(output, "<i4")
        ends[session_id, turn] = np.concatenate([prompt, output_ids])
        yield RecordedTurn(session_id, turn, parent, prompt, output_ids, np.frombuffer(logprobs, "<f4"), length, digest)
    database.close()


def test_a_run_has_at_least_eight_sessions_that_take_several_turns(turns: list[RecordedTurn]) -> None:
    """The game is really played: most sessions need more than one guess."""
    per_session: dict[str, int] = {}
    for turn in turns:
        per_session[turn.session_id] = per_session.get(turn.session_id, 0) + 1
    assert len(per_session) >= 8
    assert sum(count > 1 for count in per_session.values()) >= 6


def test_what_the_engine_got_is_the_parent_and_what_is_new(turns: list[RecordedTurn]) -> None:
    """The digest taken of each prompt as it was sent equals that of parent + context: nothing sampled was altered."""
    for turn in turns:
        sent = turn.prompt_ids.astype("<i4")
        assert (sent.size, blake2b(sent.tobytes(), digest_size=16).hexdigest()) == (
            turn.prompt_length,
            turn.prompt_digest,
        )


def test_prompt_and_output_of_a_turn_begin_the_prompt_of_the_next(turns: list[RecordedTurn]) -> None:
    """I1 over the whole run."""
    by_index = {(turn.session_id, turn.index): turn for turn in turns}
    children = [turn for turn in turns if turn.parent is not None]
    assert children
    for turn in children:
        parent = by_index[turn.session_id, turn.parent]
        before = np.concatenate([parent.prompt_ids, parent.output_ids])
        assert turn.prompt_length > before.size
        assert np.array_equal(turn.prompt_ids[: before.size], before)


def test_every_token_is_in_the_ledger_as_others_count_it(
    run_dir: Path, turns: list[RecordedTurn], samples: list[dict[str, Any]]
) -> None:
    """I4: as the database, the engine and the samples have them; and the ledger balances."""
    result = json.loads((run_dir / "result.json").read_text())
    ledger, heard = result["ledger"], result["witness"]
    sampled = sum(turn.output_ids.size for turn in turns)
    assert (ledger["generated"], heard["engines"], heard["difference"]) == (sampled, sampled, 0)
    assert heard["not_comparable"] == []
    assert ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values()) == sampled
    assert sum(sum(sample["loss_mask"]) for sample in samples) == ledger["trained"]


def test_samples_agree_with_one_plain_forward_pass(samples: list[dict[str, Any]], whole_model_dir: Path) -> None:
    """For every trained token of a sample of each group: the recorded logprob is the model's own, to 1e-3."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(whole_model_dir, dtype=torch.float32).eval()
    worst = 0.0
    for sample in {each["group_index"]: each for each in samples}.values():
        exact = logprobs_of(model, sample["tokens"])[-sample["response_length"] :]
        trained = np.array(sample["loss_mask"], dtype=bool)
        assert trained.any()
        worst = max(worst, float(np.abs(exact - np.array(sample["rollout_log_probs"]))[trained].max()))
    assert worst < 1e-3


def test_parquet_holds_the_same_samples(run_dir: Path, samples: list[dict[str, Any]]) -> None:
    import pyarrow.parquet as pq

    rows = pq.read_table(run_dir / "samples.parquet").to_pylist()
    assert [row["tokens"] for row in rows] == [sample["tokens"] for sample in samples]
    assert [row["loss_mask"] for row in rows] == [sample["loss_mask"] for sample in samples]
    assert [row["reward"] for row in rows] == [sample["reward"] for sample in samples]


def test_the_run_directory_says_what_was_run(run_dir: Path) -> None:
    """Configuration, versions and digests, one log per session, the result."""
    lock = json.loads((run_dir / "lock.json").read_text())
    names = {path.name for path in run_dir.iterdir()}
    assert {"config.toml", "lock.json", "run.db", "samples.jsonl", "samples.parquet", "result.json"} <= names
    assert all(lock[key] for key in ("versions", "digests"))
    assert list(lock["engines"].values()) == [["local"]]
    logs = sorted(run_dir.glob("sessions/*/agent.log"))
    assert len(logs) >= 8
    assert all(log.stat().st_size for log in logs)
