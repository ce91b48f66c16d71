"""The connections to one engine server."""

import asyncio

import pytest

from harness.engines.remote.http_bodies import server_message
from harness.engines.remote.http_client import EngineClient, HttpCall
from harness.engines.remote.sglang_wire import ModelInfo
from harness.errors import EngineReplyInvalid, EngineUnavailable
from tests.fake_engines.fake_server import serving
from tests.fake_engines.providers import make_fake, scripted_engine


async def test_a_call_while_the_connections_are_closed_is_refused_by_its_type():
    """Closing takes a moment; who asks meanwhile learns the same as who asks afterwards."""
    fake = make_fake("sglang", scripted_engine())
    async with serving(fake, notices_disconnects=False):
        client = EngineClient(fake.url, "sglang")
        client.open()
        await client.get_text("/model_info", deadline_s=5)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="is not connected"):
            await client.get_text("/model_info", deadline_s=5)
        await closing
        await client.close()


DEEP = b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


async def test_json_that_is_nested_beyond_reason_is_an_invalid_reply():
    """Wherever it stands in an answer, in a field that nobody reads or in the words of an error."""
    client = EngineClient("http://127.0.0.1:1", "sglang")

    with pytest.raises(EngineReplyInvalid, match="check the version of the server"):
        client.decode(HttpCall("GET", "/model_info", 5), DEEP, ModelInfo)
    assert server_message(DEEP)
