"""A finished `chat.completion` as the `chat.completion.chunk`s of a streamed answer.

Pure. Whoever adds the deltas up gets the message of the completion, character for character. The chunks are made from
a completion that is recorded, not while the engine samples: what has left the server cannot be taken back, and an
answer that a drain cuts short must not be read as one.
"""

from collections.abc import Iterator

from harness.dialects.sse import encoded_event, event
from harness.types import Json

DONE = encoded_event(b"[DONE]")
"""What OpenAI clients read up to."""

_SHORTEST_PIECE = 128  # characters of a delta
_MOST_PIECES = 32  # deltas of a text: several for whoever shows them, few for whoever parses them
_HEAD = ("id", "created", "model")


def stream_body(completion: Json, *, wants_usage: bool) -> bytes:
    """Everything that a client reads of `completion`, `DONE` included."""
    return b"".join(event(chunk) for chunk in chunks(completion, wants_usage=wants_usage)) + DONE


def chunks(completion: Json, *, wants_usage: bool) -> Iterator[Json]:
    """The chunks of `completion`, in order: role, reasoning, content, tool calls, how it finished, usage if wanted.

    What is not of a message (logprobs, keys beyond the dialect) is in the chunk that says how it finished.
    """
    head = {"object": "chat.completion.chunk", **{key: completion[key] for key in _HEAD}}
    usage = {"usage": None} if wants_usage else {}
    choice = completion["choices"][0]
    for delta in _deltas(choice["message"]):
        yield head | {"choices": [_choice(delta)]} | usage
    finish = _choice({}, finish_reason=choice["finish_reason"], logprobs=choice["logprobs"])
    yield _beyond_the_dialect(completion) | head | {"choices": [finish]} | usage
    if wants_usage:
        yield head | {"choices": [], "usage": completion["usage"]}


def _deltas(message: Json) -> Iterator[Json]:
    """What is added to the message, bit by bit."""
    yield {"role": message["role"], "content": None if message["content"] is None else ""}
    for field in ("reasoning_content", "content"):
        for piece in _pieces(message.get(field) or ""):
            yield {field: piece}
    for index, call in enumerate(message.get("tool_calls", ())):
        yield {"tool_calls": [{"index": index, **call, "function": call["function"] | {"arguments": ""}}]}
        for piece in _pieces(call["function"]["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _pieces(text: str) -> Iterator[str]:
    size = max(_SHORTEST_PIECE, -(-len(text) // _MOST_PIECES))
    return (text[start : start + size] for start in range(0, len(text), size))


def _choice(delta: Json, finish_reason: str | None = None, logprobs: Json | None = None) -> Json:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}


def _beyond_the_dialect(completion: Json) -> Json:
    return {key: value for key, value in completion.items() if key not in ("object", "choices", "usage", *_HEAD)}
