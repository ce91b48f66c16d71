"""A toy dialect, as it is asked for: one question, and what was said before it, every other line by the model."""

from typing import Any

import msgspec

from harness.dialects.json_values import decode_json
from harness.dialects.model_request import ModelRequest, Streaming, ToolMode
from harness.dialects.request_limits import RequestLimits
from harness.types import SamplingWishes

NAME = "toy"


class _WireRequest(msgspec.Struct):
    ask: str
    before: list[str] = []
    words: int | None = None
    aloud: bool = False


_decoder = msgspec.json.Decoder(_WireRequest)


def parse_toy(body: bytes, limits: RequestLimits) -> ModelRequest:
    """The request in `body`. Raises `MalformedRequest` naming the offending field, `OverLimit` naming the limit."""
    wire = decode_json(_decoder, body)
    lines = [*wire.before, wire.ask]
    messages: list[dict[str, Any]] = [
        {"role": "assistant" if i % 2 else "user", "content": line} for i, line in enumerate(lines)
    ]
    request = ModelRequest(
        dialect=NAME,
        messages=tuple(messages),
        tools=(),
        tool_mode=ToolMode.AUTO,
        tool_name=None,
        sampling=SamplingWishes(max_new_tokens=wire.words),
        wants_logprobs=False,
        model="",
        streaming=Streaming(wants_usage=False) if wire.aloud else None,
    )
    limits.check(request.messages, request.tools, request.sampling)
    return request
