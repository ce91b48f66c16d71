"""Harbor itself, with our agent in it: its `rollout_details` are our samples, and an abort is no failure.

`HARNESS_HARBOR_PYTHON` names the Python of an environment that has Harbor, made as CONTRIBUTING.md says. Every job is a
`harbor run`: trials, verifiers, results and, for the tasks that ship, containers are Harbor's own.
"""

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
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
from harness.suite.record.config import Overrides
from harness.types import Json, as_ids
from tests.builders import toy_template
from tests.checkout import ROOT
from tests.free_ports import free_ports
from tests.played_suites import play
from tests.real.trainers.test_trainers_themselves import python_with
from tests.sandbox_programs import configure_podman, podman_image, require_program

TASKS = ROOT / "scenarios" / "terminal_tasks"

SOLVED = {"build-an-app": "VERSION", "collect-errors": "logs", "sum-sales": "sales.csv"}
"""Tasks that the model solves, with a file that only they have."""
SOLUTIONS = "".join(
    f"if test -e {file}\nthen\n{(TASKS / name / 'solution/solve.sh').read_text()}\nfi\n"
    for name, file in SOLVED.items()
)
STEPS = (
    ScriptStep(text="Let me look.\n```sh\nls\n```"),
    ScriptStep(text=f"```sh\n{SOLUTIONS}```"),
    ScriptStep(text="Done."),
)
"""A model that says the same, whichever task it is asked."""

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
        python = Path(python_with("harbor"))
        (work / "job.json").write_text(json.dumps({**self.job, **changes}))
        harbor = await asyncio.create_subprocess_exec(
            *(python.with_name("harbor"), "run", "--config", "job.json", "--yes"),
            cwd=work,
            env={
                **os.environ,
                "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),  # where podman-compose is
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
            },
        )
        try:
            assert await harbor.wait() == 0
        finally:
            if harbor.returncode is None:
                harbor.send_signal(signal.SIGINT)  # it stops its containers
                await asyncio.wait_for(harbor.wait(), 60)
        return [json.loads(path.read_text()) for path in sorted((work / "jobs").glob("*/*/result.json"))]

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
        yield HarborRun(server, engine, store, {**job, "jobs_dir": "jobs", "quiet": True})
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


@pytest.mark.timeout(1200)  # Harbor starts twenty commands for each of ten containers
async def test_oracle_and_agent_play_the_tasks_in_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle has every reward. The agent, beside it in one job, has three of five, and every token."""
    require_program("podman")
    configure_podman(tmp_path, monkeypatch)
    tasks = Path(shutil.copytree(TASKS, tmp_path / "tasks"))
    for recipe in tasks.glob("*/environment/Dockerfile"):
        recipe.write_text(recipe.read_text().replace("python:3.12-slim", podman_image()))
    host = tmp_path / "host.yaml"
    host.write_text("services: {main: {network_mode: host}}")
    async with harbor_run(tmp_path, monkeypatch, *STEPS) as run:
        changes = {
            "agents": [{"name": "oracle"}, *run.job["agents"]],
            "environment": {"type": "podman", "extra_docker_compose": [str(host)]},
            "tasks": [{"path": str(path)} for path in sorted(tasks.iterdir())],
        }
        trials = await run.play(tmp_path, **changes)

    rewards: dict[str, dict[str, float]] = {"oracle": {}, "shell": {}}
    for trial in trials:
        assert trial["exception_info"] is None
        rewards[trial["agent_info"]["name"]][trial["task_name"]] = trial["verifier_result"]["rewards"]["reward"]
    names = [path.name for path in tasks.iterdir()]
    assert rewards == {"oracle": dict.fromkeys(names, 1.0), "shell": {name: float(name in SOLVED) for name in names}}
    for trial in trials:
        if trial["agent_info"]["name"] == "oracle":
            continue
        told = trial["agent_result"]
        check_details(trial, run.samples(trial))
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


async def test_the_viewer_opens_trials_of_a_run(tmp_path: Path) -> None:
    """Of `harness run --harbor`: task, reward and the verifier's output of each."""
    harbor = Path(python_with("harbor")).with_name("harbor")
    require_program("bwrap")
    settings = ['agent.sandbox.kind="bwrap"']
    await play(TASKS, tmp_path / "run", Overrides(settings=settings, filter=["metadata.task~s$"]))
    port = free_ports()
    viewer = await asyncio.create_subprocess_exec(
        harbor, "view", "--jobs", "--no-build", "--port", str(port), tmp_path / "run"
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/api/jobs/trials", trust_env=False) as client:
            while True:
                try:
                    trials = (await client.get("/trials")).json()["items"]
                    break
                except httpx.ConnectError:
                    assert viewer.returncode is None
                    await asyncio.sleep(0.2)
            details = [(await client.get(f"/trials/{trial['name']}")).json() for trial in trials]
    finally:
        viewer.kill()
        await viewer.wait()

    assert {(trial["task_name"], trial["reward"]) for trial in trials} == {("collect-errors", 1.0), ("sum-sales", 1.0)}
    assert all(trial["error_type"] is None and trial["finished_at"] for trial in trials)
    assert {trial["agent_result"]["metadata"]["outcome"] for trial in details} == {"no_model_call"}
