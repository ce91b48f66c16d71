"""Harbor itself, with our agent in it: its `rollout_details` are our samples, and an abort is no failure.

`HARNESS_HARBOR_PYTHON` names the Python of an environment that has Harbor, made as CONTRIBUTING.md says.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.control.abort import abort_rollout
from harness.server.collecting import collect_json
from harness.server.serving import RunningServer, serve
from harness.server.settings import ServerSettings
from harness.server.store.sqlite import SQLiteStore, read_session
from harness.types import Json, as_ids
from tests.builders import toy_template
from tests.checkout import ROOT
from tests.real.trainers.test_trainers_themselves import ask, python_with
from tests.sandbox_programs import require_program

TASKS = ROOT / "scenarios" / "terminal_tasks"

SOLUTION = (TASKS / "sum-sales/solution/solve.sh").read_text()
STEPS = (
    ScriptStep(text="Let me look.\n```sh\nls\n```"),
    ScriptStep(text=f"```sh\nif test -e sales.csv; then\n{SOLUTION}fi\n```"),
    ScriptStep(text="Done."),
)
"""A model that solves one task, whichever it is asked."""

ENDLESS = ScriptStep(text="And so on. " * 500, token_delay_s=0.05)
TOKEN = "secret"


class HarborRun(NamedTuple):
    """A session server, its store and a job."""

    server: RunningServer
    engine: ScriptedEngine
    store: Path
    job: Json

    async def play(self, work: Path, **changes: Any) -> list[Json]:
        """Return the results of the trials of the job."""
        found: list[Json] = await ask(python_with("harbor"), "harbor_program.py", work, **{**self.job, **changes})
        return found

    def samples(self, trial: Json) -> list[Json]:
        """Return what `GET /sessions/{id}/samples` answered when the trial's session was deleted."""
        session = read_session(self.store, trial["agent_result"]["metadata"]["session_id"])
        samples: list[Json] = collect_json(session, None)["samples"]
        return samples


@asynccontextmanager
async def harbor_run(work: Path, monkeypatch: pytest.MonkeyPatch, *steps: ScriptStep) -> AsyncIterator[HarborRun]:
    """Serve `steps`, with the job of docs/tasks.md on two tasks; it leaves no session."""
    python_with("harbor")
    require_program("bwrap")
    monkeypatch.setenv("HARNESS_ADMIN_TOKEN", TOKEN)
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "true")  # else it asks the internet
    [shown] = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/tasks.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    job = yaml.safe_load(shown)
    chat_tokenizer = toy_template()
    engine = ScriptedEngine(chat_tokenizer.tokenizer, Script(steps))
    store = work / "sessions.sqlite"
    async with serve(engine, chat_tokenizer, SQLiteStore(store), ServerSettings(admin_token=TOKEN)) as server:
        [agent] = job["agents"]
        agent["kwargs"] |= {"agent": "harbor_program:ShellAgent", "session_server": server.url}
        job["environment"] = {"import_path": "harbor_program:BwrapEnvironment"}
        job["datasets"] = []
        job["tasks"] = [{"path": str(TASKS / name)} for name in ("fix-the-calendar", "sum-sales")]
        yield HarborRun(server, engine, store, {**job, "jobs_dir": str(work / "jobs"), "quiet": True})
        assert len(server.server.sessions) == 0
        assert not engine.live


def check_details(trial: Json, samples: list[Json]) -> None:
    """The details are the samples: every token, its mask and its logprob, of every turn."""
    details = trial["agent_result"]["rollout_details"]
    assert len(details) == len(samples)
    for detail, sample in zip(details, samples, strict=True):
        start = len(sample["tokens"]) - sample["response_length"]
        mask, logprobs = np.zeros(sample["response_length"]), np.zeros(sample["response_length"])
        ends = []
        rows = (detail[name] for name in ("prompt_token_ids", "completion_token_ids", "logprobs"))
        for prompt, said, told, trained in zip(*rows, detail["extra"]["loss_mask"], strict=True):
            assert sample["tokens"][: len(prompt) + len(said)] == prompt + said
            ends.append(len(prompt) + len(said))
            mask[len(prompt) - start : ends[-1] - start] = trained
            logprobs[len(prompt) - start : ends[-1] - start] = told
        assert ends[-1] == len(sample["tokens"])
        assert mask.tolist() == sample["loss_mask"]
        assert logprobs.tolist() == sample["rollout_log_probs"]


async def test_a_job_has_rewards_and_every_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Harbor's verifiers reward one task of two."""
    async with harbor_run(tmp_path, monkeypatch, *STEPS) as run:
        trials = await run.play(tmp_path)

    rewards = {trial["task_name"].rpartition("/")[2]: trial["verifier_result"]["rewards"] for trial in trials}
    assert rewards == {"fix-the-calendar": {"reward": 0.0}, "sum-sales": {"reward": 1.0}}
    for trial in trials:
        told = trial["agent_result"]
        check_details(trial, run.samples(trial))
        assert trial["exception_info"] is None
        assert trial["agent_info"]["name"] == "shell"
        assert (told["metadata"]["outcome"], told["metadata"]["aborted"]) == ("finished", False)
        assert told["metadata"]["agent"] == "was asked"
        assert (
            told["n_output_tokens"]
            == told["metadata"]["ledger"]["trained"]
            == sum(len(each) for each in told["rollout_details"][0]["completion_token_ids"])
        )


def task_of_two_steps(folder: Path) -> Path:
    """Write a task whose steps are both rewarded."""
    task = folder / "two-steps"
    (task / "environment").mkdir(parents=True)
    steps = "".join(f'[[steps]]\nname = "{name}"\n' for name in ("one", "two"))
    (task / "task.toml").write_text(f'version = "1.0"\n{steps}')
    for name in ("one", "two"):
        (task / "steps" / name / "tests").mkdir(parents=True)
        (task / "steps" / name / "instruction.md").write_text(f"This is step {name}.")
        (task / "steps" / name / "tests" / "test.sh").write_text("#!/bin/sh\necho 1 >/logs/verifier/reward.txt\n")
    return task


async def test_each_step_has_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a step are those of its own conversation."""
    async with harbor_run(tmp_path, monkeypatch, *STEPS) as run:
        [trial] = await run.play(tmp_path, tasks=[{"path": str(task_of_two_steps(tmp_path))}])

    assert trial["exception_info"] is None
    decode = toy_template().tokenizer.decode
    for step in trial["step_results"]:
        assert step["verifier_result"]["rewards"] == {"reward": 1.0}
        check_details(step, run.samples(step))
        [detail] = step["agent_result"]["rollout_details"]
        assert f"This is step {step['step_name']}." in decode(as_ids(detail["prompt_token_ids"][0]))
        assert len(detail["completion_token_ids"]) == len(STEPS)


async def test_an_abort_is_no_failure_and_keeps_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All agents are in a turn when the rollout ends; they meet its end, and their trials tell it. No step follows."""
    async with harbor_run(tmp_path, monkeypatch, STEPS[0], ENDLESS) as run:
        run.job["agents"][0]["kwargs"]["breaks"] = "logs"
        tasks = [*run.job["tasks"], {"path": str(task_of_two_steps(tmp_path))}]
        playing = asyncio.create_task(run.play(tmp_path, tasks=tasks))
        while sum(each.sampled > 5 for each in run.engine.live) < len(tasks):
            await asyncio.sleep(0.05)
        server = SessionServerAddress(run.server.url, TOKEN)
        report = await abort_rollout([], session_servers=[server], engine_workers=[run.engine])
        trials = await playing

    assert not report.problems
    assert [trial["exception_info"] for trial in trials] == [None] * len(tasks)
    [steps] = [trial["step_results"] for trial in trials if trial["step_results"]]
    for trial in [steps[0], *(trial for trial in trials if not trial["step_results"])]:
        told = trial["agent_result"]
        assert trial["exception_info"] is None
        assert (told["metadata"]["outcome"], told["metadata"]["aborted"]) == ("drained", True)
        check_details(trial, run.samples(trial))
        assert [each["status"] for each in told["metadata"]["samples"]] == ["aborted"]
        assert told["rollout_details"][0]["completion_token_ids"][1]
    assert steps[1]["exception_info"] is None
    assert steps[1]["agent_result"]["metadata"] == {"aborted": True}
    assert steps[1]["agent_result"]["rollout_details"] is None


async def test_failures_are_errors_and_keep_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Harbor cancels one agent in its second turn, which no client takes; the other cannot be installed."""
    async with harbor_run(tmp_path, monkeypatch, STEPS[0], ENDLESS) as run:
        [agent] = run.job["agents"]
        broken = {**agent, "kwargs": {**agent["kwargs"], "breaks": "install"}}
        agents = [{**agent, "override_timeout_sec": 15}, broken]
        trials = await run.play(tmp_path, agents=agents, tasks=run.job["tasks"][1:])

    by_error = {trial["exception_info"]["exception_type"]: trial for trial in trials}
    assert by_error.keys() == {"AgentTimeoutError", "RuntimeError"}
    assert by_error["RuntimeError"]["agent_result"] is None
    trial = by_error["AgentTimeoutError"]
    told = trial["agent_result"]["metadata"]
    assert (told["outcome"], told["aborted"]) == ("timed_out", False)
    assert [each["status"] for each in told["samples"]] == ["completed"]
    assert told["ledger"]["dropped"]["undelivered"] > 0
    check_details(trial, run.samples(trial))
