"""The real gateways: what each of them does to a request, how they are told apart, and that they die with us."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from harness.gateway.router.gateway_program import GatewayProgram
from server_patch.router.app import open_http
from server_patch.router.fan_out import WorkerList, answer_of
from server_patch.router.gateway import Gateway, GatewayError, GatewayKind, attach, launch
from tests.fake_engines.fake_server import FakeServer
from tests.fake_engines.workers import PATIENCE_S, fake_workers, serving_app

GENERATE = {
    "input_ids": [40, 41, 42],
    "rid": "0" * 32,
    "return_logprob": True,
    "logprob_start_len": -1,
    "return_prompt_token_ids": True,
    "session_id": "s",
    "a_field_of_tomorrow": 1,
    "sampling_params": {"max_new_tokens": 3, "temperature": 1.0, "custom_params": {"repeat_prefix_len": 2}},
}
COMPLETION = {"model": "scripted", "prompt": [40, 41, 42], "max_tokens": 3, "return_token_ids": True}
CHAT = {
    "model": "scripted",
    "messages": [{"role": "user", "content": "hi"}],
    "input_ids": [40, 41, 42],
    "rid": "1" * 32,
    "return_meta_info": True,
    "return_token_ids": True,
}


@asynccontextmanager
async def started(
    program: GatewayProgram, log_file: Path
) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession, FakeServer]]:
    """A gateway that knows its one worker."""
    async with (
        fake_workers("sglang") as [fake],
        open_http() as http,
        launch(http, program.executable, program.kind, [fake.url], log_file=log_file) as gateway,
    ):
        await lists(WorkerList(http, gateway.url), [fake.url])
        yield gateway, http, fake


async def lists(workers: WorkerList, urls: list[str]) -> None:
    """Return once the gateway lists exactly `urls`."""
    async with asyncio.timeout(PATIENCE_S):
        while not await workers.look() or sorted(worker.url for worker in workers.current) != sorted(urls):
            await asyncio.sleep(0.05)


async def arrived(http: aiohttp.ClientSession, gateway: Gateway, fake: FakeServer, path: str, body: dict) -> dict:
    """What the worker gets when a client sends `body` to the gateway."""
    async with asyncio.timeout(PATIENCE_S), http.post(gateway.url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()
    return fake.bodies[-1]


async def test_smg_passes_every_field(smg, tmp_path):
    """Fields of tomorrow too; the worker gets what the client sent."""
    async with started(smg, tmp_path / "log") as (gateway, http, fake):
        assert (gateway.kind, gateway.restrictions) == (GatewayKind.SMG, ())
        assert await arrived(http, gateway, fake, "/generate", GENERATE) == GENERATE
        assert await arrived(http, gateway, fake, "/v1/chat/completions", CHAT) == CHAT
        assert await arrived(http, gateway, fake, "/v1/completions", COMPLETION) == COMPLETION


async def test_sglang_router_loses_fields_and_is_called_restricted(sglang_router, tmp_path):
    """The trap of the stock router: ids of a chat never reach the engine, which then samples from its own template."""
    async with started(sglang_router, tmp_path / "log") as (gateway, http, fake):
        assert gateway.kind is GatewayKind.SGLANG_ROUTER
        assert any("input_ids" in restriction for restriction in gateway.restrictions)
        generate = await arrived(http, gateway, fake, "/generate", GENERATE)
        chat = await arrived(http, gateway, fake, "/v1/chat/completions", CHAT)
        async with http.post(f"{gateway.url}/v1/completions", json=COMPLETION) as refused:
            assert refused.status == 422

    assert {"input_ids", "rid"} <= generate.keys()
    assert {"return_prompt_token_ids", "session_id", "a_field_of_tomorrow"} & generate.keys() == set()
    assert "custom_params" not in generate["sampling_params"]
    assert {"input_ids", "rid", "return_meta_info", "return_token_ids"} & chat.keys() == set()


@pytest.mark.parametrize("kind", ["smg", "sglang_router"])
async def test_a_failing_generation_is_asked_for_once(kind, request, tmp_path):
    """Retries are off: one that is repeated would be sampled several times."""
    program = request.getfixturevalue(kind)
    async with started(program, tmp_path / "log") as (gateway, http, fake):
        from tests.fake_engines.lies import Lie

        fake.lie = Lie.STATUS_503
        async with http.post(f"{gateway.url}/generate", json=GENERATE) as answer:
            await answer.read()

        assert answer.status == 503
        assert len(fake.bodies) == 1


@pytest.mark.parametrize("kind", ["smg", "sglang_router"])
async def test_workers_that_come_and_go_are_followed(kind, request, tmp_path):
    program = request.getfixturevalue(kind)
    async with started(program, tmp_path / "log") as (gateway, http, fake), fake_workers("sglang") as [second]:
        workers = WorkerList(http, gateway.url)
        async with http.post(f"{gateway.url}/workers", json={"url": second.url}) as answer:
            assert answer.status == 202
        await lists(workers, [fake.url, second.url])
        listed = await answer_of(http, f"{gateway.url}/workers")
        [first_id] = [each["id"] for each in listed["workers"] if each["url"] == fake.url]
        async with http.delete(f"{gateway.url}/workers/{first_id}") as answer:
            assert answer.status == 202
        await lists(workers, [second.url])


async def test_the_gateway_dies_with_its_owner(smg, tmp_path):
    """Not even `kill -9` leaves it behind."""
    command = [sys.executable, str(Path(__file__).with_name("hold_gateway.py")), "smg", str(smg.executable)]
    holder = await asyncio.create_subprocess_exec(*command, str(tmp_path / "log"), stdout=asyncio.subprocess.PIPE)
    try:
        assert holder.stdout is not None
        async with asyncio.timeout(PATIENCE_S), open_http() as http:
            url = (await holder.stdout.readline()).decode().strip()
            assert await answer_of(http, f"{url}/workers") is not None
            holder.send_signal(signal.SIGKILL)
            await holder.wait()
            while await answer_of(http, f"{url}/workers") is not None:
                await asyncio.sleep(0.05)
    finally:
        if holder.returncode is None:
            holder.kill()
            await holder.wait()


async def test_a_gateway_that_does_not_start_says_why(tmp_path):
    program = tmp_path / "gateway"
    program.write_text("#!/bin/sh\necho 'no such policy' >&2\nexit 3\n")
    program.chmod(0o755)
    async with open_http() as http:
        with pytest.raises(GatewayError, match="exit code 3: no such policy"):
            async with launch(http, program, GatewayKind.SMG, [], log_file=tmp_path / "log"):
                pass


@pytest.mark.parametrize("ends", ["", "exec >&- 2>&-; sleep 0.3; "], ids=["at once", "after its output"])
async def test_a_gateway_that_talks_much_fills_no_disk(tmp_path, ends):
    """The end of what it says stays, in two files of bounded size; also when the log was long before."""
    program = tmp_path / "gateway"
    program.write_text(f"#!/bin/sh\nfor n in $(seq 400); do echo line $n; done\necho 'the end' >&2\n{ends}exit 3\n")
    program.chmod(0o755)
    (tmp_path / "log").write_bytes(b"x" * 5000)
    async with open_http() as http:
        launching = launch(http, program, GatewayKind.SMG, [], log_file=tmp_path / "log", log_bytes=1000)
        with pytest.raises(GatewayError, match=r"the end"):
            async with launching:
                pass

    logs = [path for path in tmp_path.iterdir() if path.name.startswith("log")]
    assert sorted(path.name for path in logs) == ["log", "log.1"]
    assert ((tmp_path / "log.1").read_text() + (tmp_path / "log").read_text()).endswith("line 400\nthe end\n")


async def test_a_log_that_cannot_be_written_is_named(tmp_path):
    async with open_http() as http:
        launching = launch(http, tmp_path / "none", GatewayKind.SMG, [], log_file=tmp_path / "no" / "log")
        with pytest.raises(GatewayError, match="cannot write the gateway's log"):
            async with launching:
                pass


async def test_what_is_no_gateway_is_refused(tmp_path):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps({"detail": "Not Found"}).encode()})

    async with serving_app(app) as url, open_http() as http:
        with pytest.raises(GatewayError, match=r"expected a gateway at .* lists no workers"):
            await attach(http, url)
