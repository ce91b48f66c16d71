"""Tasks in Harbor's format, in boxes of both kinds: solved by their solutions, by nothing, and by a model's words."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import tomli_w

from harness.errors import RunError
from harness.rollouts.agents.programs import bundled_directory
from harness.samples.rollout import OutcomeKind
from harness.suite.judge.trial import TaskImages
from harness.suite.record.config import Overrides
from harness.suite.record.rollout_table import RolloutRecord, read_rollouts
from harness.suite.tasks.harbor_task import HarborTask, find_tasks
from harness.viewer.look import look_at
from harness.viewer.replay import plan_again
from tests.harness_command import write_scenario
from tests.played_suites import play
from tests.sandbox_programs import builds_images, configure_podman, podman_image, require_program

NAMES = ("build-an-app", "collect-errors", "fix-the-calendar", "stop-the-counter", "sum-sales")

AGENT = """
import json, os, subprocess, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": os.environ["HARNESS_INSTRUCTION"]}]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
subprocess.run(["sh", "-c", said], check=False)
"""


@pytest.fixture(name="tasks")
def _tasks(tmp_path: Path) -> Path:
    """A copy of the tasks that ship."""
    return Path(shutil.copytree(bundled_directory("scenarios") / "terminal_tasks", tmp_path / "s/tasks"))


@pytest.fixture(name="built")
def _built(tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The tasks, with images that are built upon one that is made here."""
    require_program("podman")
    configure_podman(tmp_path, monkeypatch)
    for recipe in tasks.glob("*/environment/Dockerfile"):
        # Images of its own: removing them below ends the containers of every test that has the same.
        recipe.write_text(f"# {tmp_path}\n" + recipe.read_text().replace("python:3.12-slim", podman_image()))
    yield tasks
    images = [HarborTask.load(task).image("podman") for task in find_tasks(tasks)]
    subprocess.run(["podman", "rmi", "--force", *images], check=True, capture_output=True, timeout=200)


async def _play(suite: Path, out: Path, kind: str, agent: str | None = None) -> Mapping[str, RolloutRecord]:
    """Records by task."""
    await play(suite, out, Overrides(agent=agent, settings=[f'agent.sandbox.kind="{kind}"', "concurrency=2"]))
    return {record.score["task"]: record for record in read_rollouts(out / "run.db").values()}


async def test_solutions_get_the_reward_and_nothing_gets_none(tasks: Path, tmp_path: Path):
    require_program("bwrap")
    solved = await _play(tasks, tmp_path / "oracle", "bwrap")
    left = await _play(tasks, tmp_path / "nop", "bwrap", "nop")

    assert {name: record.reward for name, record in solved.items()} == dict.fromkeys(NAMES, 1.0), solved
    assert {name: record.reward for name, record in left.items()} == dict.fromkeys(NAMES, 0.0), left


@builds_images
async def test_solutions_get_the_reward_in_containers(built: Path, tmp_path: Path):
    """Their images are built, their workdirs are the images'."""
    solved = await _play(built, tmp_path / "oracle", "podman")

    assert {name: record.reward for name, record in solved.items()} == dict.fromkeys(NAMES, 1.0), solved


@builds_images
async def test_any_user_of_a_container_gets_a_verdict(built: Path, tmp_path: Path):
    """Its verifier has a home that the agent never had. As that user, the solution cannot write to the workdir."""
    task = built / "sum-sales"
    test = (task / "tests/test.sh").read_text()
    (task / "tests/test.sh").write_text(f"{test}cd && touch any && printf %s $PWD >/logs/verifier/wrote\n")
    settings = ['agent.sandbox.kind="podman"', 'agent.sandbox.user="1000"']
    await play(task, tmp_path / "run", Overrides(settings=settings))
    [record] = read_rollouts(tmp_path / "run/run.db").values()

    assert record.reward == 0.0, record
    assert (tmp_path / "run/trials/0/verifier/wrote").read_text() == "/logs/verifier/home"


async def test_a_model_that_says_some_solutions_gets_their_rewards(tasks: Path, tmp_path: Path):
    """Three of five; each is one sample with its reward."""
    require_program("bwrap")
    directory = tasks.parent
    script = "".join(
        f"if test -e {file}\nthen\n{_solution(name)}\nfi\n"
        for name, file in (("build-an-app", "VERSION"), ("collect-errors", "logs"), ("sum-sales", "sales.csv"))
    )
    write_scenario(
        directory,
        check=None,
        program=AGENT,
        script={"steps": [{"text": script}]},
        samples_per_prompt=1,
        agent={"profile": f"{Path(sys.executable).resolve()} agent.py", "sandbox": {"kind": "bwrap"}},
        harbor="tasks",
    )
    path = directory / "scenario.toml"
    keys = tomllib.loads(path.read_text())
    del keys["prompts"]
    path.write_text(tomli_w.dumps(keys))
    records = await _play(directory, tmp_path / "run", "bwrap")

    assert {name: (record.reward, len(record.samples)) for name, record in records.items()} == {
        name: (float(name in ("build-an-app", "collect-errors", "sum-sales")), 1) for name in NAMES
    }
    with pytest.raises(RunError, match="rollout 0 is a Harbor task"):  # replayed or forked, it would run on the host
        plan_again(tmp_path / "run", look_at(tmp_path / "run").find("0"))


def _fake_podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    fake = tmp_path / "bin/podman"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")


async def test_an_image_that_cannot_be_built_is_its_tasks_outcome(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As a sandbox that failed, which runs again on resume; other tasks continue."""
    _fake_podman(tmp_path, monkeypatch, "echo no such base >&2\nexit 125")
    await play(tasks, tmp_path / "run", Overrides(settings=['agent.sandbox.kind="podman"']))
    records = read_rollouts(tmp_path / "run/run.db").values()

    assert {(record.outcome, record.reward) for record in records} == {(OutcomeKind.SANDBOX_FAILED, None)}
    assert {record.number for record in records} == set(range(len(NAMES)))
    assert all("Dockerfile: `podman build` failed: no such base" in record.detail for record in records)


async def test_an_image_is_built_once_for_all_who_wait(tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """However many rollouts of its task begin at one time."""
    log = tmp_path / "calls"
    _fake_podman(
        tmp_path,
        monkeypatch,
        f'echo "$1" >>{log}\ncase "$1" in image) test -e {log}.built;; build) sleep 0.5; touch {log}.built;; esac',
    )
    task, images = HarborTask.load(tasks / "sum-sales"), TaskImages()
    names = await asyncio.gather(*(images.make(task, "podman") for _ in range(5)))

    assert names == [task.image("podman")] * 5
    assert sorted(log.read_text().split()) == ["build", *["image"] * 5]


def _solution(name: str) -> str:
    return (bundled_directory("scenarios") / "terminal_tasks" / name / "solution/solve.sh").read_text()


def _task(directory: Path, test: str, **keys: object) -> Path:
    (directory / "tests").mkdir(parents=True)
    (directory / "solution").mkdir()
    (directory / "task.toml").write_text(tomli_w.dumps(keys))
    (directory / "instruction.md").write_text("Nothing.")
    (directory / "tests/test.sh").write_text(f"#!/bin/sh\n{test}\n")
    (directory / "solution/solve.sh").write_text(
        "#!/bin/sh\necho 1 >/logs/verifier/reward.txt\nls /tests >/logs/agent/seen\n"
    )
    return directory


async def test_a_solution_cannot_end_its_verifier(tasks: Path, tmp_path: Path):
    """A module whose import ends the process is no solution."""
    require_program("bwrap")
    solution = tasks / "fix-the-calendar/solution/solve.sh"
    solution.write_text("#!/bin/sh\necho 'raise SystemExit(0)' >/app/calendar_days.py\n")
    [record] = (await _play(tasks / "fix-the-calendar", tmp_path / "run", "bwrap")).values()

    assert record.reward == 0.0, record


HOSTILE = {
    "deep": "cd /logs/verifier; mkdir -p $(printf 'd/%.0s' $(seq 1500))",
    "absurd": """echo '{"reward": 1, "x": "\\ud800"}' >/logs/verifier/reward.json""",
    "shut": "mkdir -p /logs/verifier/a/b; echo 1 >/logs/verifier/reward.txt; chmod 0 /logs/verifier",
    "greedy": "python3 -c 'bytearray(1 << 30)' || true",
}
"""What agents do to their verifiers."""


async def test_no_agent_ends_the_rollouts_of_others(tmp_path: Path):
    """Whatever it leaves for the verifier, whose verdict counts."""
    require_program("bwrap")
    suite = tmp_path / "suite"
    limits = {"memory_mb": 256} if os.access("/sys/fs/cgroup", os.W_OK) else {}
    for name, script in HOSTILE.items():
        test = "echo 0.5 >/logs/verifier/reward.txt; exit 3"
        directory = _task(suite / name, test, environment=limits)
        (directory / "solution/solve.sh").write_text(f"#!/bin/sh\n{script}\n")
    records = await _play(suite, tmp_path / "run", "bwrap")

    assert {name: record.reward for name, record in records.items()} == dict.fromkeys(HOSTILE, 0.5), records


async def test_a_verifier_without_a_verdict_is_no_reward(tmp_path: Path):
    """Nor is a reward that the agent wrote. The agent does not see the tests, and every rollout says what is wrong."""
    require_program("bwrap")
    suite = tmp_path / "suite"
    _task(suite / "hangs", "sleep 600 & sleep 600", verifier={"timeout_sec": 0.5})
    _task(suite / "silent", "exit 0")
    _task(suite / "mumbles", "echo well >/logs/verifier/reward.txt")
    _task(
        suite / "says-json",
        """echo; echo style is 2; echo '{"reward": 0.25, "style": 2}' >/logs/verifier/reward.json""",
    )
    records = await _play(suite, tmp_path / "run", "bwrap")
    said = {name: record.score_error for name, record in records.items()}

    assert records["says-json"].reward == 0.25
    assert records["says-json"].score == {"task": "says-json"}
    assert records["says-json"].judged == {"figures": {"style": 2}, "reason": "style is 2"}
    assert {record.reward for name, record in records.items() if name != "says-json"} == {None}
    assert said["hangs"] == "the verifier did not end within 0.5 s; the rollout is no_model_call"
    assert "expected the verifier to write reward.txt or reward.json, got neither" in str(said["silent"])
    assert "reward.txt: expected a reward, got 'well" in str(said["mumbles"])
    assert [path.read_text() for path in (tmp_path / "run/trials").glob("*/agent/seen")] == [""] * 4
    results = [json.loads(path.read_text()) for path in (tmp_path / "run/trials").glob("*/result.json")]
    for result in results:
        record = records[result["task_name"]]
        failure = result["exception_info"] or {"exception_message": None}
        assert failure["exception_message"] == record.score_error
        assert (result["verifier_result"] or {"rewards": {"reward": None}})["rewards"] == {"reward": record.reward}
    assert {result["task_name"] for result in results} == records.keys()


@builds_images
async def test_a_user_of_an_image_writes_logs_and_a_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Into folders that the harness made, which no other user of this machine can enter."""
    require_program("podman")
    configure_podman(tmp_path, monkeypatch)
    task = _task(tmp_path / "suite" / "as-a-user", "echo 1 >/logs/verifier/reward.txt")
    (task / "environment").mkdir()
    (task / "environment" / "Dockerfile").write_text(f"FROM {podman_image()}\nCOPY . /app\nUSER 1234:99\n")
    records = await _play(task.parent, tmp_path / "run", "podman")
    image = HarborTask.load(task).image("podman")
    subprocess.run(["podman", "rmi", "--force", image], check=True, capture_output=True, timeout=200)

    assert records["as-a-user"].reward == 1.0, records
    (seen,) = (tmp_path / "run/trials").glob("*/agent/seen")
    assert (seen.stat().st_uid, seen.parent.parent.stat().st_mode & 0o777) == (1234, 0o700)
