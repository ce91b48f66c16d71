"""A rollout of a Harbor task: what its box shows, and what its verifier says.

The box shows `/logs` and, to the verifier, `/tests`: folders of the trial. bwrap shows `environment/` as the workdir,
which is the image's in a container.
"""

import asyncio
import errno
import json
import math
import os
import shutil
from collections import defaultdict
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from harness.errors import SandboxFailed, ScenarioError
from harness.machine.disk import disk_failures, make_way
from harness.rollouts.agents.agent_output import read_last_lines
from harness.rollouts.agents.task import AgentTask, ProgramAgent
from harness.rollouts.sandboxes.sandbox import BWRAP, Sandbox, StartOnHost, call
from harness.rollouts.sandboxes.spec import SandboxSpec
from harness.samples.rollout import OutcomeKind
from harness.suite.judge.reward import MAX_REASON, Score
from harness.suite.record.rollout_table import RolloutRecord
from harness.suite.tasks.harbor_task import DOCKERFILE, ORACLE, HarborTask
from harness.types import Json

# A home of the verifier's own: Python executes what an agent may have written to the usual one.
_HOME = "/logs/verifier/home"
_OUTPUT = "test-stdout.txt"
_RUN_TESTS = f"/tests/test.sh >/logs/verifier/{_OUTPUT} 2>&1"
_SAID_LINES = 3
"""Last lines of the verifier's output that are the reason."""
_GRACE_S = 2.0
_INSPECT_S = 30.0
_MOST_CHARACTERS = 1 << 20
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class TaskImages:
    """Images of tasks, each built once, however many rollouts wait for it."""

    def __init__(self) -> None:
        self._building: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def make(self, task: HarborTask, kind: str) -> str:
        """Return the name of the task's image, which exists now unless the task names it. Raises `SandboxFailed`."""
        image = await asyncio.to_thread(task.image, kind)
        if task.keys.environment.docker_image is None:
            async with self._building[image]:
                await _build(task, kind, image)
        return image


class Trial:
    """One rollout's folders, box and verdict."""

    def __init__(self, task: HarborTask, folder: Path, spec: SandboxSpec, agent: str, images: TaskImages) -> None:
        """`folder` is outside the rollout's workdir, where the agent may write."""
        self._task, self._folder, self._images = task, folder.absolute(), images
        self._spec, self._agent, self._is_oracle = spec, agent, agent == ORACLE
        self._verdict = Score(error="the verifier did not run")

    async def around(self, task: AgentTask) -> AgentTask:
        """Return the rollout's `task` in a sandbox with a verifier. Raises `SandboxFailed`."""
        keys = self._task.keys
        env = self._task.variables(keys.environment.env | (keys.solution.env if self._is_oracle else {}))
        assert isinstance(task.agent, ProgramAgent), "a function has no sandbox"
        try:
            sandbox = await self._prepare()
        except OSError as error:
            raise SandboxFailed(f"the trial's folders cannot be made: {error}") from error
        return replace(
            task,
            agent=replace(task.agent, env={**env, **task.agent.env}),
            deadline_s=keys.agent.timeout_sec or task.deadline_s,
            cwd=Path(self._task.workdir),
            sandbox=sandbox,
            after=self._verify,
        )

    async def _prepare(self) -> SandboxSpec:
        await asyncio.to_thread(self._make_folders)
        mounts = ["agent:/logs/agent:rw", "verifier:/logs/verifier:rw", "artifacts:/logs/artifacts:rw", "tests:/tests"]
        mounts += ["solution:/solution"] if self._is_oracle else []
        image = self._spec.image
        if self._spec.kind == BWRAP:
            mounts.append(f"workdir:{self._task.workdir}:rw")
        elif image is None:
            image = await self._images.make(self._task, self._spec.kind)
        given, keys = self._spec, self._task.keys.environment
        return SandboxSpec(
            **given.model_dump(exclude={"image", "mounts", "cpus", "memory_mb"}),
            image=image,
            mounts=(*given.mounts, *(f"{self._folder}/{mount}" for mount in mounts)),
            cpus=given.cpus or keys.cpus,
            memory_mb=given.memory_mb or keys.memory_mb,
        )

    async def _verify(self, sandbox: Sandbox, start: StartOnHost) -> None:
        """Run the task's tests in the box of the agent, which has ended. Raises `SandboxFailed`."""
        keys = self._task.keys
        deadline_s = keys.verifier.timeout_sec
        env = {"HOME": _HOME, "PYTHONNOUSERSITE": "1"} | ({"PATH": _PATH} if self._spec.kind == BWRAP else {})
        env |= self._task.variables(keys.environment.env | keys.verifier.env)
        command = ("sh", "-c", _RUN_TESTS)
        try:
            await asyncio.to_thread(self._show_tests)
            tests = await sandbox.exec(command, env=env, cwd=Path(self._task.workdir), on_host=start)
        except (OSError, ValueError) as error:
            self._verdict = Score(error=f"the verifier did not start: {error}")
            return
        try:
            async with asyncio.timeout(deadline_s):
                code = await tests.wait()
            verdict = await asyncio.to_thread(self._read_verdict)
            # The memory limit may have killed programs of the agent before; a verdict says that it spared the verifier.
            failure = await sandbox.find_failure() if code and verdict.reward is None else None
            if failure is not None:
                raise SandboxFailed(f"in the verifier: {failure}")
            self._verdict = verdict
        except TimeoutError:
            self._verdict = Score(error=f"the verifier did not end within {deadline_s:g} s")
        finally:
            await tests.stop(grace_s=_GRACE_S)
            await asyncio.to_thread(make_way, self._folder / _HOME.removeprefix("/logs/"))

    def score(self, outcome: OutcomeKind) -> Score:
        """Return the verdict, or why there is none."""
        error = self._verdict.error
        return replace(
            self._verdict,
            details={"task": self._task.name, **self._verdict.details},
            error=error and f"{error}; the rollout is {outcome}",
        )

    def write_result(self, record: RolloutRecord) -> None:
        """Write the `result.json` by which Harbor's viewer opens the trial. Raises `StoreError`."""
        result = _result_of(self._task, self._folder, self._agent, record, datetime.now(UTC))
        with disk_failures(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._folder / "result.json").write_text(json.dumps(result, indent=2), encoding="utf-8")

    def _read_verdict(self) -> Score:
        try:
            score = read_rewards(self._folder / "verifier")
        except ScenarioError as error:
            score = Score(error=error.message)
        said = read_last_lines(self._folder / "verifier" / _OUTPUT, _SAID_LINES) or ()
        return replace(score, reason="\n".join(said)[-MAX_REASON:])

    def _make_folders(self) -> None:
        make_way(self._folder)
        self._folder.mkdir(mode=0o700, parents=True)
        (self._folder / "tests").mkdir()
        for name in ("agent", "verifier", "artifacts"):
            self._make_writable(self._folder / name)
        if self._is_oracle:
            _show(self._task.directory / "solution", self._folder / "solution", "solve.sh")
        if self._spec.kind == BWRAP:
            (self._folder / "workdir").mkdir()
            source = self._task.directory / "environment"
            if source.is_dir():
                ignore = shutil.ignore_patterns(DOCKERFILE, ".dockerignore")
                shutil.copytree(source, self._folder / "workdir", symlinks=True, dirs_exist_ok=True, ignore=ignore)

    def _make_writable(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755 if self._spec.kind == BWRAP else 0o777)  # the user of a container is any

    def _show_tests(self) -> None:
        verifier = self._folder / "verifier"
        self._make_writable(verifier)
        for path in verifier.iterdir():  # a reward that the agent wrote
            make_way(path)
        if any(verifier.iterdir()):
            raise OSError(errno.ENOTEMPTY, "the agent left files that cannot be removed", str(verifier))
        self._make_writable(self._folder / _HOME.removeprefix("/logs/"))
        _show(self._task.directory / "tests", self._folder / "tests", "test.sh")


def read_rewards(folder: Path) -> Score:
    """Read `reward.json`, else `reward.txt`. Raises `ScenarioError` without a finite reward."""
    path, text = None, ""
    try:
        path = next((folder / name for name in ("reward.json", "reward.txt") if (folder / name).is_file()), None)
        if path is None or path.is_symlink():
            raise ScenarioError(f"{folder}: expected the verifier to write reward.txt or reward.json, got neither")
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_MOST_CHARACTERS)
        found: Any = json.loads(text) if path.suffix == ".json" else float(text)
        parts = found if isinstance(found, dict) else {"reward": found}
        numbers = {name: float(value) for name, value in parts.items() if type(value) in (int, float)}
        "".join(parts).encode()  # the record is UTF-8, and JSON can name lone surrogates
    except (ValueError, OverflowError, RecursionError, OSError) as error:
        raise ScenarioError(f"{path or folder}: expected a reward, got {text[:60]!r}: {error!s:.200}") from None
    reward = numbers.get("reward", next(iter(numbers.values()), None) if len(parts) == 1 else None)
    if reward is None or len(numbers) < len(parts) or not all(map(math.isfinite, numbers.values())):
        raise ScenarioError(f"{path}: expected finite numbers, and a reward, got {text[:60]!r}")
    return Score(reward, figures={name: value for name, value in numbers.items() if name != "reward"})


def _result_of(task: HarborTask, folder: Path, agent: str, record: RolloutRecord, ended_at: datetime) -> Json:
    """Return Harbor's `TrialResult`: a reward, or an exception unless the rollout was aborted."""
    is_aborted = record.outcome is OutcomeKind.DRAINED
    where, ended = {"path": str(task.directory.absolute())}, ended_at.isoformat()
    failure = {
        "exception_type": str(record.outcome),
        "exception_message": record.score_error or record.detail,
        "exception_traceback": record.detail,
        "occurred_at": ended,
    }
    return {
        "task_name": task.name,
        "trial_name": folder.name,
        "trial_uri": folder.as_uri(),
        "task_id": where,
        "task_checksum": "",
        "config": {"task": where, "trial_name": folder.name},
        "agent_info": {"name": agent, "version": "unknown"},
        "agent_result": {
            "n_output_tokens": record.session.ledger.generated,
            "metadata": {"session_id": record.session_id, "outcome": str(record.outcome), "aborted": is_aborted},
        },
        "verifier_result": None if record.reward is None else {"rewards": {"reward": record.reward}},
        "exception_info": failure if record.reward is None and not is_aborted else None,
        "started_at": (ended_at - timedelta(seconds=record.seconds)).isoformat(),
        "finished_at": ended,
    }


async def _build(task: HarborTask, kind: str, image: str) -> None:
    if not (await call(kind, "image", "inspect", image, deadline_s=_INSPECT_S, env=os.environ)).code:
        return
    assert task.dockerfile is not None, "`require_playable` checks it"
    build = (kind, "build", "--quiet", "--tag", image, str(task.dockerfile.parent))
    ended = await call(*build, deadline_s=task.keys.environment.build_timeout_sec, env=os.environ)
    if ended.code:
        raise SandboxFailed(f"{task.dockerfile}: `{kind} build` failed: {ended.messages.strip()[-500:]}")


def _show(source: Path, target: Path, script: str) -> None:
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    (target / script).chmod(0o755)
