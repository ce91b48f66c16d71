"""A rollout of a Harbor task: what its box shows, and what its verifier says.

The box shows `/logs` and, to the verifier, `/tests`: folders of the trial. bwrap shows `environment/` as the workdir,
which is the image's in a container.
"""

import asyncio
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.errors import SandboxFailed, ScenarioError
from harness.machine.disk import make_way
from harness.rollouts.agents.task import AgentTask, ProgramAgent
from harness.rollouts.sandboxes.sandbox import Sandbox, StartOnHost, call
from harness.rollouts.sandboxes.spec import BWRAP, SandboxSpec
from harness.samples.rollout import OutcomeKind
from harness.suite.judge.reward import Score
from harness.suite.tasks.harbor_task import DOCKERFILE, ORACLE, HarborTask

_TESTS = "/tests/test.sh"
_STDOUT = "/logs/verifier/test-stdout.txt"
_GRACE_S = 2.0
_INSPECT_S = 30.0
_MOST_CHARACTERS = 1 << 20
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Trial:
    """One rollout's folders, box and verdict."""

    def __init__(self, task: HarborTask, folder: Path, spec: SandboxSpec, agent: str) -> None:
        """`folder` is outside the rollout's workdir, where the agent may write."""
        self._task, self._folder = task, folder.absolute()
        self._spec, self._is_oracle = spec, agent == ORACLE
        self._problem: str | None = "the verifier did not run"

    async def around(self, task: AgentTask) -> AgentTask:
        """Return the rollout's `task` in a sandbox with a verifier. Raises `SandboxFailed` or `ScenarioError`."""
        keys = self._task.keys
        env = self._task.variables(keys.environment.env | (keys.solution.env if self._is_oracle else {}))
        assert isinstance(task.agent, ProgramAgent), "a function has no sandbox"
        return replace(
            task,
            agent=replace(task.agent, env={**env, **task.agent.env}),
            deadline_s=keys.agent.timeout_sec or task.deadline_s,
            cwd=Path(self._task.workdir),
            sandbox=await self._prepare(),
            after=self._verify,
        )

    async def _prepare(self) -> SandboxSpec:
        """Make the folders and the image."""
        await asyncio.to_thread(self._make_folders)
        mounts = ["agent:/logs/agent:rw", "verifier:/logs/verifier:rw", "artifacts:/logs/artifacts:rw", "tests:/tests"]
        mounts += ["solution:/solution"] if self._is_oracle else []
        image = self._spec.image
        if self._spec.kind == BWRAP:
            mounts.append(f"workdir:{self._task.workdir}:rw")
        elif image is None:
            image = await _build(self._task, self._spec.kind)
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
        await asyncio.to_thread(self._show_tests)
        env = {"PATH": _PATH, "HOME": "/tmp"} if self._spec.kind == BWRAP else {}  # noqa: S108  # of the box
        env |= self._task.variables(keys.environment.env | keys.verifier.env)
        command = ("sh", "-c", f"{_TESTS} >{_STDOUT} 2>&1")
        tests = await sandbox.exec(command, env=env, cwd=Path(self._task.workdir), on_host=start)
        try:
            async with asyncio.timeout(deadline_s):
                code = await tests.wait()
            failure = await sandbox.find_failure() if code else None
            if failure is not None:
                raise SandboxFailed(f"in the verifier: {failure}")
            self._problem = None
        except TimeoutError:
            self._problem = f"the verifier did not end within {deadline_s:g} s"
        finally:
            await tests.stop(grace_s=_GRACE_S)

    def score(self, outcome: OutcomeKind) -> Score:
        """Return the verdict, or why there is none."""
        if self._problem is not None:
            return Score(error=f"{self._problem}; the rollout is {outcome}", details={"task": self._task.name})
        try:
            verdict = read_rewards(self._folder / "verifier")
            return replace(verdict, details={"task": self._task.name, **verdict.details})
        except ScenarioError as error:
            return Score(error=error.message, details={"task": self._task.name})

    def _make_folders(self) -> None:
        make_way(self._folder)
        for name in ("agent", "verifier", "artifacts", "tests"):
            (self._folder / name).mkdir(parents=True)
            (self._folder / name).chmod(0o777)  # the image may have any user
        self._folder.chmod(0o700)  # no other user of this machine
        if self._is_oracle:
            _show(self._task.directory / "solution", self._folder / "solution", "solve.sh")
        if self._spec.kind == BWRAP:
            (self._folder / "workdir").mkdir()
            source = self._task.directory / "environment"
            if source.is_dir():
                ignore = shutil.ignore_patterns(DOCKERFILE, ".dockerignore")
                shutil.copytree(source, self._folder / "workdir", symlinks=True, dirs_exist_ok=True, ignore=ignore)

    def _show_tests(self) -> None:
        for path in (self._folder / "verifier").iterdir():  # a reward that the agent wrote
            make_way(path)
        _show(self._task.directory / "tests", self._folder / "tests", "test.sh")


def read_rewards(folder: Path) -> Score:
    """Read `reward.json`, else `reward.txt`. Raises `ScenarioError` without a finite reward."""
    path = next((folder / name for name in ("reward.json", "reward.txt") if (folder / name).is_file()), None)
    if path is None or path.is_symlink():
        raise ScenarioError(f"{folder}: expected the verifier to write reward.txt or reward.json, got neither")
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(_MOST_CHARACTERS)
    try:
        found: Any = json.loads(text) if path.suffix == ".json" else float(text)
    except ValueError:
        raise ScenarioError(f"{path}: expected a reward, got {text[:60]!r}") from None
    parts = found if isinstance(found, dict) else {"reward": found}
    reward = parts.get("reward", next(iter(parts.values())) if len(parts) == 1 else None)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ScenarioError(f"{path}: expected a finite number as the reward, got {text[:60]!r}")
    return Score(float(reward), {name: value for name, value in parts.items() if name != "reward"})


async def _build(task: HarborTask, kind: str) -> str:
    """Return the task's image, which exists now or is named. Raises `SandboxFailed` or `ScenarioError`."""
    image = await asyncio.to_thread(task.image, kind)
    if task.keys.environment.docker_image is not None:
        return image
    if not (await call(kind, "image", "inspect", image, deadline_s=_INSPECT_S, env=os.environ)).code:
        return image
    if task.dockerfile is None:
        raise ScenarioError(
            f"{task.directory}: expected environment/{DOCKERFILE} or environment.docker_image, got neither"
        )
    build = (kind, "build", "--quiet", "--tag", image, str(task.dockerfile.parent))
    ended = await call(*build, deadline_s=task.keys.environment.build_timeout_sec, env=os.environ)
    if ended.code:
        raise SandboxFailed(f"{task.dockerfile}: `{kind} build` failed: {ended.messages.strip()[-500:]}")
    return image


def _show(source: Path, target: Path, script: str) -> None:
    """Copy what the box shows, with a script that can be executed."""
    if not (source / script).is_file():
        raise ScenarioError(f"{source}: expected {script}, got none")
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    (target / script).chmod(0o755)
