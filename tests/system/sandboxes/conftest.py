"""Boxes of each kind that this machine has, and a rollout in one."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from harness.rollouts.agents.task import AgentTask, ProgramAgent
from harness.rollouts.manager import SessionManager
from harness.rollouts.sandboxes.spec import SandboxSpec
from harness.samples.rollout import Rollout
from harness.server.serving import RunningServer
from tests.sandbox_programs import configure_podman, podman_image, require_program
from tests.session_servers.scripted import scripted_server

KINDS = ("bwrap", "podman")
MakeSpec = Callable[..., SandboxSpec]
RunBoxed = Callable[..., Awaitable[Rollout]]


@pytest.fixture(name="kind", params=KINDS)
def _kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture(name="spec_of")
def _spec_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeSpec:
    """Makes the spec of a kind, with the image that the tests made."""

    def spec_of(kind: str, **limits: Any) -> SandboxSpec:
        require_program(kind)
        if kind == "podman":
            configure_podman(tmp_path, monkeypatch)
            limits = {"image": podman_image(), **limits}
        return SandboxSpec(kind=kind, **limits)

    return spec_of


@pytest_asyncio.fixture(name="server")
async def _server() -> AsyncIterator[RunningServer]:
    async with scripted_server() as server:
        yield server


@pytest_asyncio.fixture(name="manager")
async def _manager(server: RunningServer) -> AsyncIterator[SessionManager]:
    async with SessionManager(server.url, grace_s=1.0) as manager:
        yield manager


def python_of(kind: str) -> str:
    """A Python that a box of `kind` has."""
    return "python3" if kind == "podman" else str(Path(sys.executable).resolve())


def boxed_task(spec: SandboxSpec, script: str, workdir: Path, **task: Any) -> AgentTask:
    """A rollout of a Python `script` in a box."""
    agent = ProgramAgent("boxed", (python_of(spec.kind), "-I", "-S", "-c", script), sandbox=spec)
    return AgentTask(agent, "Go.", workdir, "scripted", **{"deadline_s": 60.0, **task})


@pytest.fixture(name="run_boxed")
def _run_boxed(manager: SessionManager, tmp_path: Path) -> RunBoxed:
    async def run(spec: SandboxSpec, script: str, **task: Any) -> Rollout:
        return await manager.run(boxed_task(spec, script, tmp_path / "run" / "1", **task))

    return run
