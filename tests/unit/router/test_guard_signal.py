"""What the repeat guard did reaches clients that talk to the engines through the router."""

import json

import aiohttp
import pytest
from starlette.types import Receive, Scope, Send

from server_patch.repeat_terminate.signals import MARK, SGLANG_MATCHED, VLLM_FINISH
from server_patch.router.app import open_http
from server_patch.router.passthrough import Passthrough, is_triggered, with_signal_bytes, wrapped_bytes
from tests.fake_engines.workers import serving_app

SGLANG_CHAT = {"choices": [{"finish_reason": "length", "matched_stop": SGLANG_MATCHED}]}
VLLM_CHAT = {"choices": [{"finish_reason": VLLM_FINISH, "stop_reason": MARK}]}
VLLM_OWN = {"choices": [{"finish_reason": VLLM_FINISH, "stop_reason": "repetition_detected"}]}
STOPPED = {"choices": [{"finish_reason": "stop", "matched_stop": 2}]}
GUARDED = {"output_ids": [1], "meta_info": {"finish_reason": {"type": "length", MARK: 1}}}
WATCHED = {"output_ids": [1], "meta_info": {"finish_reason": {"type": "stop", MARK: 0}}}


@pytest.mark.parametrize(
    ("answer", "triggered"), [(SGLANG_CHAT, 1), (VLLM_CHAT, 1), (VLLM_OWN, 0), (STOPPED, 0), (GUARDED, 1), (WATCHED, 0)]
)
def test_the_engine_s_own_word_decides(answer: dict, triggered: int) -> None:
    """VLLM's own detection of repetitions is not the guard."""
    assert is_triggered(answer) == bool(triggered)


def test_the_key_is_added_and_no_other_byte_changes() -> None:
    """Numbers too large for a float and odd spaces survive."""
    content = b'{ "big": 1152921504606846976,"choices" : [{"matched_stop":null}] }\n'
    amended = with_signal_bytes(content)

    assert amended.startswith(content.rstrip()[:-1])
    assert json.loads(amended)["harness"] == {"repeat_terminate_triggered": 0}
    assert with_signal_bytes(b'{"object": "error"}') == b'{"object": "error"}'
    assert with_signal_bytes(b"<html>") == b"<html>"


def test_a_batch_comes_wrapped_with_a_signal_per_sequence() -> None:
    content = json.dumps([GUARDED, WATCHED]).encode()
    assert json.loads(wrapped_bytes(content)) == {
        "response": [GUARDED, WATCHED],
        "harness": [{"repeat_terminate_triggered": 1}, {"repeat_terminate_triggered": 0}],
    }


@pytest.mark.parametrize(
    ("path", "headers", "keys"),
    [
        ("/v1/chat/completions", {}, {"choices", "harness"}),
        ("/v1/chat/completions", {"x-harness-wrapped": "1"}, {"response", "harness"}),
        ("/generate", {"x-harness-wrapped": "1"}, {"response", "harness"}),
        ("/generate", {}, {"choices"}),
        ("/v1/embeddings", {"x-harness-wrapped": "1"}, {"choices"}),
    ],
)
async def test_answers_of_the_gateway_are_amended_where_it_says_so(path: str, headers: dict, keys: set) -> None:
    async def gateway(scope: Scope, receive: Receive, send: Send) -> None:
        content = json.dumps(SGLANG_CHAT).encode()
        sent = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": sent})
        await send({"type": "http.response.body", "body": content})

    async with (
        serving_app(gateway) as upstream,
        open_http() as http,
        serving_app(Passthrough(http, upstream, is_guarded=lambda: True)) as url,
        aiohttp.ClientSession() as client,
        client.post(url + path, data=b"{}", headers=headers) as answer,
    ):
        assert (await answer.json()).keys() == keys
