"""Fake engine servers that a gateway takes for real ones; as a program, one of them in a process of its own.

`worker_program.py sglang|vllm PORT TOKEN_DELAY_S` prints its URL on one line once it answers, then serves until it is
killed; port 0 picks a free one. `GET /seen` says what a worker was asked: paths, and the bodies that arrived.
"""

import asyncio
import sys

from aiohttp import web

from harness.engines.base import PauseMode
from harness.engines.scripted import ScriptedEngine, ScriptStep
from tests.fake_engines.fake_server import FakeServer
from tests.fake_engines.fake_sglang import FakeSGLang
from tests.fake_engines.fake_vllm import FakeVLLM
from tests.fake_engines.providers import scripted_engine

TEXTS = tuple(f"answer {number} of this worker" for number in range(7))


class WorkerSGLang(FakeSGLang):
    """SGLang with what gateways look for, and the control verbs that sessions do not need."""

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            *_for_everybody(self),
            web.post("/v1/chat/completions", self._echo),
            web.post("/v1/completions", self._echo),
            web.route("*", "/flush_cache", self._flush),
            web.post("/update_weights_from_distributed", self._receive),
            web.post("/update_weights_from_tensor", self._receive),
        ]

    async def _echo(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        return web.json_response({"id": "1", "object": "chat.completion", "choices": [], "big": 2**60})

    async def _flush(self, request: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.\n")

    async def _receive(self, request: web.Request) -> web.Response:
        if version := (await request.json()).get("weight_version"):
            self.engine.relabel(version)
        return web.json_response({"success": True, "message": "done"})


class WorkerVLLM(FakeVLLM):
    """vLLM with what gateways look for."""

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), *_for_everybody(self)]

    async def _pause(self, request: web.Request) -> web.Response:
        self._paused = True
        if request.query["mode"] == "abort":
            await self.engine.abort(None)
        else:
            await self.engine.pause(PauseMode.KEEP)
        return web.json_response({"status": "paused"})


def _for_everybody(fake: FakeServer) -> list[web.RouteDef]:
    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def seen(request: web.Request) -> web.Response:
        return web.json_response({"paths": fake.paths, "bodies": fake.bodies})

    return [web.get("/health", health), web.get("/seen", seen)]


def make_worker(kind: str, engine: ScriptedEngine) -> FakeServer:
    """A fake `sglang` or `vllm`."""
    return WorkerSGLang(engine) if kind == "sglang" else WorkerVLLM(engine)


async def _serve(kind: str, port: int, token_delay_s: float) -> None:
    fake = make_worker(kind, scripted_engine(*(ScriptStep(text=text, token_delay_s=token_delay_s) for text in TEXTS)))
    async with fake.engine:
        runner = web.AppRunner(fake.app(), handler_cancellation=kind == "vllm")
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        host, port = runner.addresses[0][:2]
        print(f"http://{host}:{port}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
