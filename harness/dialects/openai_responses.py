"""Answers of OpenAI Responses: whole, as a stream of events, or as an error.

An answer depends only on the recorded turn and its notes, so a retry or a look-up by id returns the same. The deltas of
a stream add up to the whole answer, and each finished item is sent again whole. The last event says how the answer
ended.
"""

from collections.abc import Iterator

from harness.dialects.model_request import AnswerHead, ModelAnswer, Said, seal
from harness.dialects.openai_chat import OpenAIChat, logprob_entries
from harness.dialects.openai_responses_request import ID_PREFIX, NAME, parse_request
from harness.dialects.openai_responses_tools import call_item
from harness.dialects.sse import event, text_pieces
from harness.errors import HarnessError
from harness.tokens.parsing import Delta
from harness.turn_ends import TURN_ENDS
from harness.types import Json

_CHAT = OpenAIChat()

_INCOMPLETE = {"length": "max_output_tokens", "abort": "abort"}

_CALLS = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
"""Delta field and event prefix of a call, by item type."""


class OpenAIResponses:
    """Dialect of Codex and the OpenAI agents SDK, with the variables and errors of chat completions."""

    name = NAME
    path = "/v1/responses"
    stored_path: str | None = f"/v1/responses/{ID_PREFIX}{{response_id}}"
    client_variables = _CHAT.client_variables
    error_body = _CHAT.error_body
    parse = staticmethod(parse_request)

    def answer(self, answer: ModelAnswer) -> Json:
        """Return the `response` object, without the request's own fields."""
        turn = answer.turn
        reason = _INCOMPLETE.get(TURN_ENDS[turn.end].finish_reason or "")
        usage = {
            "input_tokens": turn.prompt_length,
            "input_tokens_details": {"cached_tokens": turn.notes.cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": turn.output_ids.size,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.prompt_length + turn.output_ids.size,
        }
        return _response(answer.response_id, turn.created_at, answer.model) | {
            "status": "completed" if reason is None else "incomplete",
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": _items(answer, "completed" if reason is None else "incomplete"),
            "usage": usage,
        }

    def stream(self, head: AnswerHead) -> "_ResponsesStream":
        return _ResponsesStream(self, head)


class _ResponsesStream:
    """Writer of one response's numbered events. Items begin while sampled and end when everything is recorded."""

    def __init__(self, dialect: OpenAIResponses, head: AnswerHead) -> None:
        self._dialect = dialect
        self._head = head
        self._number = 0
        self._said = Said()

    @property
    def has_told_id(self) -> bool:
        return bool(self._number)

    def keep_alive(self) -> bytes:
        return b"".join(self._begin()) or self._write("response.in_progress", response=self._response())

    def say(self, delta: Delta) -> bytes:
        parts = list(self._begin())
        before, self._said = self._said, self._said.after(delta)
        index = 0
        for kind, said, text in zip(("reasoning_text", "output_text"), before, delta, strict=True):
            item = _text_item(kind, "", self._head.response_id, "in_progress")
            if text and not said:
                parts += self._begin_item(item, index)
            if text:
                where = {"item_id": item["id"], "output_index": index, "content_index": 0}
                parts.append(self._write(f"response.{kind}.delta", **where, delta=text, **_no_logprobs(kind)))
            index += bool(said or text)
        return b"".join(parts)

    def end(self, answer: ModelAnswer) -> Iterator[bytes]:
        whole = self._dialect.answer(answer)
        yield from self._begin()
        for index, item in enumerate(whole["output"]):
            yield from self._item(item, index)
        yield self._write(f"response.{whole['status']}", response=whole)

    def fail(self, error: HarnessError, message: str) -> bytes:
        begun = b"".join(self._begin())
        failed = self._response() | {"status": "failed", "error": {"code": error.code, "message": message}}
        return begun + self._write("response.failed", response=failed)

    def _response(self) -> Json:
        return _response(self._head.response_id, self._head.created_at, self._head.model)

    def _write(self, kind: str, **fields: object) -> bytes:
        written = event({"type": kind, "sequence_number": self._number, **fields}, kind)
        self._number += 1
        return written

    def _begin(self) -> Iterator[bytes]:
        if not self._number:
            yield self._write("response.created", response=self._response())
            yield self._write("response.in_progress", response=self._response())

    def _begin_item(self, item: Json, index: int) -> Iterator[bytes]:
        empty: Json = {"content": [], "encrypted_content": None, "arguments": "", "input": ""}
        begun = {name: empty.get(name, value) for name, value in item.items()} | {"status": "in_progress"}
        yield self._write("response.output_item.added", output_index=index, item=begun)
        for part in item.get("content", ()):
            where = {"item_id": item["id"], "output_index": index, "content_index": 0}
            nothing = part | {"text": ""} | _no_logprobs(part["type"])
            yield self._write("response.content_part.added", **where, part=nothing)

    def _item(self, item: Json, index: int) -> Iterator[bytes]:
        said = {"reasoning": self._said.reasoning, "message": self._said.content}.get(item["type"], 0)
        if not said:
            yield from self._begin_item(item, index)
        about = {"item_id": item["id"], "output_index": index}
        if item["type"] in _CALLS:
            field, called = _CALLS[item["type"]]
            for piece in text_pieces(item[field]):
                yield self._write(f"{called}.delta", **about, delta=piece)
            yield self._write(f"{called}.done", **about, name=item["name"], **{field: item[field]})
        for part in item.get("content", ()):
            kind, where = f"response.{part['type']}", about | {"content_index": 0}
            for piece in text_pieces(part["text"][said:]):
                yield self._write(f"{kind}.delta", **where, delta=piece, **_no_logprobs(part["type"]))
            logprobs: Json = {name: part[name] for name in _no_logprobs(part["type"])}
            yield self._write(f"{kind}.done", **where, text=part["text"], **logprobs)
            yield self._write("response.content_part.done", **where, part=part)
        yield self._write("response.output_item.done", output_index=index, item=item)


def _no_logprobs(kind: str) -> Json:
    return {"logprobs": []} if kind == "output_text" else {}


def _response(response_id: str, created_at: float, model: str) -> Json:
    return {
        "id": ID_PREFIX + response_id,
        "object": "response",
        "created_at": int(created_at),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def _text_item(kind: str, text: str, response_id: str, status: str) -> Json:
    part: Json = {"type": kind, "text": text}
    if kind == "reasoning_text":
        sealed = {"summary": [], "content": [part], "encrypted_content": seal(response_id)}
        return {"id": f"rs_{response_id}", "type": "reasoning", "status": status, **sealed}
    part |= {"annotations": [], "logprobs": []}
    return {"id": f"msg_{response_id}", "type": "message", "status": status, "role": "assistant", "content": [part]}


def _items(answer: ModelAnswer, status: str) -> list[Json]:
    turn, response_id = answer.turn, answer.response_id
    reply, forms = turn.reply, turn.notes.call_forms
    items: list[Json] = []
    if reasoning := reply.get("reasoning_content"):
        items.append(_text_item("reasoning_text", reasoning, response_id, status))
    calls = reply.get("tool_calls") or ()
    content = reply.get("content") or ""
    if content or not calls:
        items.append(_text_item("output_text", content, response_id, status))
        if answer.request.wants_logprobs:
            # A reply without calls always has a text item.
            items[-1]["content"][0]["logprobs"] = logprob_entries(answer)
    return items + [call_item(call, forms, f"{response_id}_{i}") for i, call in enumerate(calls)]
