"""Things of the router tests that have to run: applications on loopback, fake workers here and as processes."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from harness.engines.scripted import ScriptStep
from harness.machine.asgi import EmbeddedServer, answering, listening
from tests.fake_engines.fake_server import FakeServer, serving
from tests.fake_engines.providers import scripted_engine
from tests.fake_engines.worker_program import make_worker

PATIENCE_S = 30.0
LONG = ScriptStep(text="The quick brown fox jumps over the lazy dog. " * 2, token_delay_s=0.05)
"""Tokens for seconds, which is longer than what happens in the midst of its turn; `hurry` ends it."""
_PROGRAM = Path(__file__).with_name("worker_program.py")


@asynccontextmanager
async def serving_app(app: ASGIApp) -> AsyncIterator[str]:
    """The base address of `app`."""
    config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1, http="httptools")
    with listening("127.0.0.1", 0) as listener:
        async with answering(EmbeddedServer(config), listener):
            yield "http://{}:{}".format(*listener.getsockname()[:2])


@asynccontextmanager
async def fake_workers(*kinds: str, step: ScriptStep | None = None) -> AsyncIterator[list[FakeServer]]:
    """Fake workers of these kinds, in this process."""
    async with AsyncExitStack() as stack:
        fakes = [make_worker(kind, scripted_engine(step or ScriptStep(text="Hello there."))) for kind in kinds]
        for kind, fake in zip(kinds, fakes, strict=True):
            await stack.enter_async_context(fake.engine)
            await stack.enter_async_context(serving(fake, notices_disconnects=kind == "vllm"))
        yield fakes


def hurry(workers: Sequence[FakeServer], *, hurries: bool = True) -> None:
    """Have them sample at once, or as their steps say again."""
    for worker in workers:
        worker.engine.hurries = hurries


@dataclass
class FakeGateway:
    """Lists workers and answers chats as a guarded SGLang does, whoever of them is asked."""

    listed: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    """What was shown as one, in order."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.keys.append(Headers(scope=scope).get("authorization", ""))
        workers = {"workers": [{"url": url} for url in self.listed]}
        answer = workers if scope["path"] == "/workers" else {"choices": [{"finish_reason": "stop"}]}
        await JSONResponse(answer)(scope, receive, send)


@dataclass
class WorkerProcess:
    """A fake worker that can be killed."""

    process: asyncio.subprocess.Process
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@dataclass
class WorkerProcesses:
    """Starts fake workers as processes."""

    started: list[WorkerProcess] = field(default_factory=list)

    async def start(self, kind: str = "sglang", *, port: int = 0, token_delay_s: float = 0.0) -> WorkerProcess:
        """A worker that answers."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(_PROGRAM), kind, str(port), str(token_delay_s)), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        worker = WorkerProcess(process, "")
        self.started.append(worker)
        async with asyncio.timeout(PATIENCE_S):
            worker.url = (await process.stdout.readline()).decode().strip()
        assert worker.url, f"the worker ended with {process.returncode}"
        return worker


@asynccontextmanager
async def worker_processes() -> AsyncIterator[WorkerProcesses]:
    """Workers started inside the block are gone after it."""
    workers = WorkerProcesses()
    try:
        yield workers
    finally:
        await asyncio.gather(*(worker.kill() for worker in workers.started))
