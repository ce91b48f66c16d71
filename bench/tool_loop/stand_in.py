"""An engine that samples nothing: SGLang's `/generate`, and chat completions with the same words, as canned bytes.

It reads of a request what an answer has to repeat (its id, how many ids it has) and costs little, so that its share of
the processor does not hide that of the servers before it. Whole answers, and streams in pieces of the same number of
tokens, as from SGLang with `--incremental-streaming-output`.
"""

import asyncio
import json
import re
from typing import Any, cast

import httptools

from bench.tool_loop.words import Output

_RID = re.compile(rb'"rid": ?"([^"]*)"')
_STREAM = re.compile(rb'"stream": ?true')
_PIECE = 50
_JSON = b"application/json"
_CARD = {"id": "stand-in", "object": "model", "owned_by": "sglang", "max_model_len": 262_144}
_SERVER = {"max_req_input_len": 262_000, "version": "0.5.23", "incremental_streaming_output": True}
_ABOUT = {
    b"/v1/models": json.dumps({"object": "list", "data": [_CARD]}).encode(),
    b"/server_info": json.dumps(_SERVER).encode(),
    b"/model_info": b'{"model_path": "/stand-in", "weight_version": "default"}',
    b"/v1/loads": b'{"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}',
}


class StandIn:
    """The answers, one after another, to whatever is asked."""

    def __init__(self, outputs: list[Output], texts: list[str], piece: int = _PIECE) -> None:
        self._piece = piece  # tokens
        self._replies = [self._whole(output) for output in outputs]
        self._streams = [self._pieces(output) for output in outputs]
        self._completions = [self._completion(text) for text in texts]
        self._asked = 0

    def answer(self, path: bytes, body: bytes) -> tuple[bytes, bytes]:
        if path == b"/generate":
            return self._generate(body)
        if path == b"/v1/chat/completions":
            self._asked += 1
            return _JSON, self._completions[self._asked % len(self._completions)]
        return _JSON, _ABOUT.get(path, b"")

    def _generate(self, body: bytes) -> tuple[bytes, bytes]:
        begin = body.index(b'"input_ids"')
        ids = body.count(b",", begin, body.index(b"]", begin)) + 1
        rid = _RID.search(body)
        assert rid is not None
        self._asked += 1
        is_streamed = _STREAM.search(body) is not None
        kept = self._streams if is_streamed else self._replies
        reply = kept[self._asked % len(kept)]
        kind = b"text/event-stream" if is_streamed else _JSON
        return kind, reply.replace(b"@RID@", rid.group(1)).replace(b"@IDS@", b"%d" % ids)

    def _whole(self, output: Output) -> bytes:
        return _dump(_reply(output, 0, len(output.ids)))

    def _pieces(self, output: Output) -> bytes:
        ends = [*range(self._piece, len(output.ids), self._piece), len(output.ids)]
        replies = (_reply(output, begin, end) for begin, end in zip([0, *ends], ends, strict=False))
        return b"".join(b"data: " + _dump(reply) + b"\n\n" for reply in replies) + b"data: [DONE]\n\n"

    def _completion(self, text: str) -> bytes:
        call = {"name": "search", "arguments": json.dumps({"query": text})}
        calls = [{"id": "call_0", "type": "function", "function": call}]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
        completion = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return json.dumps(completion).encode()


def _reply(output: Output, begin: int, end: int) -> dict[str, Any]:
    is_last = end == len(output.ids)
    entries = [[logprob, token, None] for logprob, token in zip(output.logprobs, output.ids, strict=True)]
    meta: dict[str, Any] = {
        "id": "@RID@",
        "finish_reason": {"type": "stop", "matched": output.ids[-1]} if is_last else None,
        "prompt_tokens": "@IDS@",
        "weight_version": "default",
        "total_retractions": 0,
        "output_token_logprobs": entries[begin:end],
        "completion_tokens": end,
        "cached_tokens": 0,
        "e2e_latency": 0.001,
    }
    if is_last:
        meta["weight_versions"] = [{"version": "default", "start": 0, "end": end}]
    return {"text": "", "output_ids": output.ids[begin:end], "meta_info": meta}


def _dump(reply: dict[str, Any]) -> bytes:
    return json.dumps(reply, separators=(",", ":")).replace('"@IDS@"', "@IDS@").encode()


class StandInProtocol(asyncio.Protocol):
    """HTTP/1.1 as far as clients of an engine need it."""

    def __init__(self, engine: StandIn) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is of no such class

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url, self._body = url, []

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        assert self._transport is not None
        kind, content = self._engine.answer(self._url, b"".join(self._body))
        status = b"200 OK" if content else b"404 Not Found"
        stays = self._parser.should_keep_alive()
        connection = b"keep-alive" if stays else b"close"
        head = b"HTTP/1.1 %s\r\nconnection: %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
        self._transport.writelines([head % (status, connection, kind, len(content)), content])
        if not stays:
            self._transport.close()
