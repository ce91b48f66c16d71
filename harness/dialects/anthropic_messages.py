"""Answers of Anthropic Messages: whole, as a stream of events, or as an error.

A reply is blocks: signed reasoning, recognized when a client returns it without its text; text; and tool calls, whose
arguments are the sampled JSON. The deltas of a stream add up to the whole answer.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from harness.dialects.anthropic_messages_request import NAME, parse_request
from harness.dialects.model_request import AnswerHead, ModelAnswer, Said, seal
from harness.dialects.sse import event, text_pieces
from harness.errors import GateClosed, HarnessError, PromptTooLong, RequestError, ServerBusy
from harness.tokens.parsing import Delta
from harness.turn_ends import TURN_ENDS
from harness.types import Json
from server_patch.repeat_terminate.signals import signal

_STOP_REASONS: Mapping[str | None, str] = {
    "stop": "end_turn",
    "tool_calls": "tool_use",
    "length": "max_tokens",
    "abort": "max_tokens",  # no word of the dialect says that the rest is missing for another reason
}
_ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class AnthropicMessages:
    """`CountingDialect` of the `anthropic` SDKs and the agents built on them."""

    name = NAME
    path = "/v1/messages"
    stored_path: str | None = None
    parse = staticmethod(parse_request)
    count_path = "/v1/messages/count_tokens"

    def client_variables(self, session_url: str, api_key: str, model: str) -> dict[str, str]:
        """See `Dialect`. Clients append `/v1/messages` to the address."""
        return {"ANTHROPIC_BASE_URL": session_url, "ANTHROPIC_API_KEY": api_key, "ANTHROPIC_MODEL": model}

    def answer(self, answer: ModelAnswer) -> Json:
        turn = answer.turn
        stop_reason, stop_sequence = _STOP_REASONS[TURN_ENDS[turn.end].finish_reason], None
        if stop_reason == "end_turn" and turn.notes.matched_stop in answer.request.sampling.stop:
            stop_reason, stop_sequence = "stop_sequence", turn.notes.matched_stop
        cached = min(turn.prompt_length, turn.notes.cached_tokens or 0)
        return {
            "id": f"msg_{answer.response_id}",
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": list(_blocks(answer)),
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": {
                "input_tokens": turn.prompt_length - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": int(turn.output_ids.size),
            },
            **(signal(triggered=turn.repeat_terminated) if answer.is_guarded else {}),
        }

    def stream(self, head: AnswerHead) -> "_MessagesStream":
        return _MessagesStream(self, head)

    def error_body(self, error: HarnessError, message: str, request_id: str) -> Json:
        """Return the error envelope, with our own code next to the dialect's type."""
        kind = _ERROR_TYPES.get(
            error.status, "invalid_request_error" if isinstance(error, RequestError) else "api_error"
        )
        if isinstance(error, GateClosed | ServerBusy):
            kind = "overloaded_error"
        if isinstance(error, PromptTooLong):  # the words at which agents shorten the conversation
            message = f"prompt is too long: {error.tokens} tokens > {error.context_length} maximum"
        told = {"type": kind, "message": message, "code": error.code}
        return {"type": "error", "error": told, "request_id": f"req_{request_id}"}

    def count_answer(self, tokens: int) -> Json:
        return {"input_tokens": tokens}


def _blocks(answer: ModelAnswer) -> Iterator[Json]:
    reply = answer.turn.reply
    calls = reply.get("tool_calls") or ()
    if reply.get("reasoning_content"):
        yield _thinking(reply["reasoning_content"], answer.response_id)
    if reply.get("content") or not calls:
        # Clients read the first block, so an empty reply has an empty text.
        yield {"type": "text", "text": reply.get("content") or ""}
    for call in calls:
        arguments = msgspec.Raw(call["function"]["arguments"].encode())
        yield {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}


def _thinking(reasoning: str, response_id: str) -> Json:
    return {"type": "thinking", "thinking": reasoning, "signature": seal(response_id)}


class _MessagesStream:
    def __init__(self, dialect: AnthropicMessages, head: AnswerHead) -> None:
        self._dialect = dialect
        self._head = head
        self._sent: set[tuple[str, int]] = set()
        self._said = Said()

    @property
    def has_told_id(self) -> bool:
        return bool(self._sent)

    def keep_alive(self) -> bytes:
        """Return a `ping`, which clients accept anywhere."""
        return event({"type": "ping"}, "ping")

    def say(self, delta: Delta) -> bytes:
        head, self._said = self._head, self._said.after(delta)
        thinking = _thinking(delta.reasoning, head.response_id)
        blocks = ([thinking] if self._said.reasoning else []) + [{"type": "text", "text": delta.content}]
        usage = {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}  # known at the end
        message = {"id": f"msg_{head.response_id}", "type": "message", "role": "assistant", "model": head.model}
        events = [_start(message | {"usage": usage}), *_block_events({"content": blocks}, Said())]
        # The last block may continue. Until content arrives, it is also unknown whether a text block follows.
        last = "content_block_stop" if self._said.content else "signature_delta"
        until = max(i for i, each in enumerate(events) if last in (each["type"], each.get("delta", {}).get("type")))
        return b"".join(self._write(events[:until]))

    def end(self, answer: ModelAnswer) -> Iterator[bytes]:
        message = self._dialect.answer(answer)
        yield from self._write([_start(message), *_block_events(message, self._said)])
        stop = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        beyond = {"harness": message["harness"]} if "harness" in message else {}
        yield event({"type": "message_delta", "delta": stop, "usage": message["usage"], **beyond}, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def fail(self, error: HarnessError, message: str) -> bytes:
        return event(self._dialect.error_body(error, message, self._head.response_id), "error")

    def _write(self, events: Iterable[Json]) -> Iterator[bytes]:
        # A block's start and end are sent once, even if streamed before the answer was recorded.
        for each in events:
            delta = each.get("delta", {}).get("type")
            key = (delta or each["type"], each.get("index", 0))
            if delta in (None, "signature_delta"):
                if key in self._sent:
                    continue
                self._sent.add(key)
            yield event(each, each["type"])


def _start(message: Json) -> Json:
    begun = {name: value for name, value in message.items() if name != "harness"}
    usage = message["usage"] | {"output_tokens": 0}
    nothing = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    return {"type": "message_start", "message": begun | nothing}


def _block_events(message: Json, said: Said) -> Iterator[Json]:
    for index, block in enumerate(message["content"]):
        match block["type"]:
            case "thinking":
                empty: Json = {"thinking": "", "signature": ""}
                pieces = text_pieces(block["thinking"][said.reasoning :])
                deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces]
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
            case "text":
                empty = {"text": ""}
                pieces = text_pieces(block["text"][said.content :])
                deltas = [{"type": "text_delta", "text": piece} for piece in pieces]
            case _:
                empty = {"input": {}}
                arguments = bytes(block["input"]).decode()
                deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in text_pieces(arguments)]
        yield {"type": "content_block_start", "index": index, "content_block": block | empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
