"""Bodies that clients pack: read as if they had been sent plain, within the same bounds."""

import gzip
import json
from collections.abc import Callable

import pytest
from backports import zstd

from harness.dialects.request_limits import RequestLimits
from harness.server.settings import ServerSettings
from tests.builders import user
from tests.session_servers.served import Client, Served, session_on

PACKERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd.compress}
PATHS = ("chat/completions", "responses", "messages")
BODY = {"messages": [user("hi")], "input": "hi"}
LIMITS = {"messages": {"max_tokens": 9}}  # which Messages needs


async def post(client: Client, session: Served, path: str, content: bytes, encoding: str) -> tuple[int, dict]:
    """Status and answer of a model call with that body."""
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    url = f"/sessions/{session.session_id}/v1/{path}"
    answer = await client.http.post(url, content=content, headers=headers)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("encoding", PACKERS)
@pytest.mark.parametrize("path", PATHS)
async def test_a_packed_body_is_served_in_every_dialect(client, session, encoding: str, path: str):
    """As codex sends it."""
    body = BODY | LIMITS.get(path, {})
    status, _ = await post(client, session, path, PACKERS[encoding](json.dumps(body).encode()), encoding.upper())
    [turn] = (await client.record(session))["turns"]

    assert status == 200
    assert turn["messages_delta"] == [user("hi")]


@pytest.mark.parametrize("encoding", PACKERS)
async def test_a_body_is_bounded_by_what_comes_out_of_it(encoding: str):
    """A few bytes unpack to many."""
    async with session_on(settings=ServerSettings(limits=RequestLimits(body_bytes=100_000))) as (client, session):
        packed = PACKERS[encoding](json.dumps(BODY | {"user": "x" * 50_000_000}).encode())
        status, answer = await post(client, session, PATHS[0], packed, encoding)

    assert len(packed) < 100_000
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("encoding", PACKERS)
async def test_what_comes_out_counts_among_the_calls_of_a_session(encoding: str):
    """Whatever it was on the way."""
    async with session_on(settings=ServerSettings(limits=RequestLimits(calls_bytes=10_000))) as (client, session):
        packed = PACKERS[encoding](json.dumps(BODY | {"user": "x" * 20_000}).encode())
        status, answer = await post(client, session, PATHS[0], packed, encoding)

    assert (status, answer["error"]["code"]) == (429, "too_many")


@pytest.mark.parametrize("encoding", PACKERS)
@pytest.mark.parametrize("damage", [lambda packed: packed[:-3], lambda packed: b"{}", lambda packed: packed * 2])
async def test_a_body_that_is_not_packed_as_it_says_is_malformed(
    client, session, encoding: str, damage: Callable[[bytes], bytes]
):
    """The answer says what was expected."""
    packed = damage(PACKERS[encoding](json.dumps(BODY).encode()))
    status, answer = await post(client, session, PATHS[0], packed, encoding)

    assert status == 400
    assert f"expected {encoding} data" in answer["error"]["message"]


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, zstd"])
async def test_an_encoding_that_is_not_read_is_refused_by_the_name_of_the_header(client, session, encoding: str):
    """Not as a body that is no JSON."""
    status, answer = await post(client, session, PATHS[0], b"?", encoding)

    assert (status, answer["error"]["code"]) == (415, "encoding_refused")
    assert "content-encoding: expected gzip" in answer["error"]["message"]
