"""Anthropic Messages, as they are answered: whole, as the events of a stream, or with an error.

Pure. A reply is blocks: its reasoning, signed so that it is recognized when a client sends it back without its text;
its text; its tool calls, whose arguments go out as the JSON that was sampled. The events of a stream are cut from the
recorded turn and add up to the message of the whole answer.
"""

from collections.abc import Iterator, Mapping

import msgspec

from harness.dialects.anthropic_blocks import SIGNED
from harness.dialects.anthropic_messages_request import NAME, parse_request
from harness.dialects.model_request import AnswerHead, ModelAnswer, ModelRequest, WireCall
from harness.dialects.request_limits import RequestLimits
from harness.dialects.sse import event, text_pieces
from harness.errors import GateClosed, HarnessError, RequestError, ServerBusy
from harness.tokens.history import History
from harness.turn_ends import TURN_ENDS
from harness.types import Json
from server_patch.repeat_terminate.envelope import signal

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
    """The dialect of the `anthropic` SDKs, and of agents that are built on them."""

    name = NAME
    path = "/v1/messages"
    stored_path: str | None = None
    count_path = "/v1/messages/count_tokens"

    def client_variables(self, session_url: str, api_key: str, model: str) -> dict[str, str]:
        """See `Dialect`; the clients put `/v1/messages` behind the address."""
        return {"ANTHROPIC_BASE_URL": session_url, "ANTHROPIC_API_KEY": api_key, "ANTHROPIC_MODEL": model}

    def parse(self, call: WireCall, limits: RequestLimits, history: History) -> ModelRequest:
        """See `Dialect`."""
        return parse_request(call, limits, history)

    def answer(self, answer: ModelAnswer) -> Json:
        """The `message` object."""
        turn = answer.turn
        stop_reason, stop_sequence = _STOP_REASONS[TURN_ENDS[turn.end].finish_reason], None
        if stop_reason == "end_turn" and turn.notes.get("matched_stop") in answer.request.sampling.stop:
            stop_reason, stop_sequence = "stop_sequence", turn.notes["matched_stop"]
        cached = min(turn.prompt_length, turn.notes.get("cached_tokens", 0))
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

    def keep_alive(self, head: AnswerHead) -> bytes:
        """A `ping`, which clients of the dialect expect anywhere."""
        del head
        return event({"type": "ping"}, "ping")

    def stream_parts(self, answer: ModelAnswer) -> Iterator[bytes]:
        """The events from `message_start` to `message_stop`."""
        for each in _events(self.answer(answer)):
            yield event(each, each["type"])

    def error_body(self, error: HarnessError, message: str, request_id: str) -> Json:
        """The error envelope, with our own code for it beside the type of the dialect."""
        kind = _ERROR_TYPES.get(
            error.status, "invalid_request_error" if isinstance(error, RequestError) else "api_error"
        )
        if isinstance(error, GateClosed | ServerBusy):
            kind = "overloaded_error"
        told = {"type": kind, "message": message, "code": error.code}
        return {"type": "error", "error": told, "request_id": f"req_{request_id}"}

    def error_part(self, error: HarnessError, message: str, head: AnswerHead) -> bytes:
        """The envelope as an event."""
        return event(self.error_body(error, message, head.response_id), "error")

    def count_answer(self, tokens: int) -> Json:
        """See `CountingDialect`."""
        return {"input_tokens": tokens}


def _blocks(answer: ModelAnswer) -> Iterator[Json]:
    """The blocks of the reply; an empty one has an empty text, because clients ask for the first block."""
    reply = answer.turn.reply
    calls = reply.get("tool_calls") or ()
    if reply.get("reasoning_content"):
        signature = SIGNED + answer.response_id
        yield {"type": "thinking", "thinking": reply["reasoning_content"], "signature": signature}
    if reply.get("content") or not calls:
        yield {"type": "text", "text": reply.get("content") or ""}
    for call in calls:
        arguments = msgspec.Raw(call["function"]["arguments"].encode())
        yield {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}


def _events(message: Json) -> Iterator[Json]:
    """The events of which clients make `message`."""
    usage = message["usage"]
    begun = {name: value for name, value in message.items() if name != "harness"}
    nothing = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}}
    yield {"type": "message_start", "message": begun | nothing}
    for index, block in enumerate(message["content"]):
        match block["type"]:
            case "thinking":
                empty: Json = {"thinking": "", "signature": ""}
                deltas = [{"type": "thinking_delta", "thinking": piece} for piece in text_pieces(block["thinking"])]
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
            case "text":
                empty = {"text": ""}
                deltas = [{"type": "text_delta", "text": piece} for piece in text_pieces(block["text"])]
            case _:
                empty = {"input": {}}
                arguments = bytes(block["input"]).decode()
                deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in text_pieces(arguments)]
        yield {"type": "content_block_start", "index": index, "content_block": block | empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    stop = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    beyond = {"harness": message["harness"]} if "harness" in message else {}
    yield {"type": "message_delta", "delta": stop, "usage": usage, **beyond}
    yield {"type": "message_stop"}
