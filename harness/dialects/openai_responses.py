"""OpenAI Responses, as they are answered: whole, as the events of a stream, or with an error.

Pure. All that an answer says comes from the recorded turn and its notes, so that it is the same for a retry, and
for whoever asks for it by its id. A client that adds the deltas of a stream up gets the items of the whole answer, and
each of these comes once more, whole, when it is done. A stream has one last event, which says how the answer ended;
nothing comes after it.
"""

from collections.abc import Iterator

from harness.dialects.model_request import AnswerHead, ModelAnswer, ModelRequest, WireCall
from harness.dialects.openai_chat import OpenAIChat, logprob_entries
from harness.dialects.openai_responses_items import seal_reasoning
from harness.dialects.openai_responses_request import CALL_FORMS, ID_PREFIX, NAME, parse_request
from harness.dialects.openai_responses_tools import call_item
from harness.dialects.request_limits import RequestLimits
from harness.dialects.sse import event, text_pieces
from harness.errors import HarnessError
from harness.tokens.history import History
from harness.turn_ends import TURN_ENDS
from harness.types import Json

_CHAT = OpenAIChat()

_INCOMPLETE = {"length": "max_output_tokens", "abort": "abort"}
"""The reasons of answers that are incomplete, by the finish reasons of `TURN_ENDS`."""

_TEXTS = {"output_text": "response.output_text", "reasoning_text": "response.reasoning_text"}
"""The events of a part that comes in deltas, by its type."""
_CALLS = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
"""The field of a call that comes in deltas, and its events, by the type of the item."""


class OpenAIResponses:
    """The dialect of Codex and of the agents SDK of OpenAI; variables and errors are those of chat completions."""

    name = NAME
    path = "/v1/responses"
    stored_path: str | None = f"/v1/responses/{ID_PREFIX}{{response_id}}"
    client_variables = _CHAT.client_variables
    error_body = _CHAT.error_body

    def parse(self, call: WireCall, limits: RequestLimits, history: History) -> ModelRequest:
        """See `Dialect`."""
        return parse_request(call, limits, history)

    def answer(self, answer: ModelAnswer) -> Json:
        """The `response` object. It does not repeat what the request said."""
        turn = answer.turn
        reason = _INCOMPLETE.get(TURN_ENDS[turn.end].finish_reason or "")
        usage = {
            "input_tokens": turn.prompt_length,
            "input_tokens_details": {"cached_tokens": turn.notes.get("cached_tokens", 0), "cache_write_tokens": 0},
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

    def keep_alive(self, head: AnswerHead) -> bytes:
        """The response in progress; the first one begins it."""
        response = _response(head.response_id, head.created_at, head.model)
        return b"".join(_Events(head.keep_alives).progress(response))

    def stream_parts(self, answer: ModelAnswer) -> Iterator[bytes]:
        """The items of the answer one by one, and how it ended."""
        whole = self.answer(answer)
        events = _Events(answer.keep_alives)
        if not answer.keep_alives:
            yield from events.progress(_response(answer.response_id, answer.turn.created_at, answer.model))
        for index, item in enumerate(whole["output"]):
            yield from events.item(item, index)
        yield events.write(f"response.{whole['status']}", response=whole)

    def error_part(self, error: HarnessError, message: str, head: AnswerHead) -> bytes:
        """The response as one that failed."""
        response = _response(head.response_id, head.created_at, head.model)
        events = _Events(head.keep_alives)
        opening = b"" if head.keep_alives else b"".join(events.progress(response))
        failed = response | {"status": "failed", "error": {"code": error.code, "message": message}}
        return opening + events.write("response.failed", response=failed)


class _Events:
    """The events of one stream, numbered, behind those that have kept it alive so far."""

    def __init__(self, keep_alives: int) -> None:
        self._number = keep_alives + 1 if keep_alives else 0  # the first of these parts has two events

    def write(self, kind: str, **fields: object) -> bytes:
        """The next event."""
        written = event({"type": kind, "sequence_number": self._number, **fields}, kind)
        self._number += 1
        return written

    def progress(self, response: Json) -> Iterator[bytes]:
        """The response has begun, if this is the beginning, and is in progress."""
        if not self._number:
            yield self.write("response.created", response=response)
        yield self.write("response.in_progress", response=response)

    def item(self, item: Json, index: int) -> Iterator[bytes]:
        """An item of the output: that it is there, its deltas, and once more the whole of it."""
        field, called = _CALLS.get(item["type"], ("content", ""))
        empty: Json = {"content": [], "encrypted_content": None, "arguments": "", "input": ""}
        begun = {name: empty.get(name, value) for name, value in item.items()} | {"status": "in_progress"}
        yield self.write("response.output_item.added", output_index=index, item=begun)
        about = {"item_id": item["id"], "output_index": index}
        if called:
            for piece in text_pieces(item[field]):
                yield self.write(f"{called}.delta", **about, delta=piece)
            yield self.write(f"{called}.done", **about, name=item["name"], **{field: item[field]})
        else:
            for i, part in enumerate(item.get("content", ())):
                yield from self._part(part, about | {"content_index": i})
        yield self.write("response.output_item.done", output_index=index, item=item)

    def _part(self, part: Json, about: Json) -> Iterator[bytes]:
        kind = _TEXTS[part["type"]]
        logprobs: Json = {name: part[name] for name in ("logprobs",) if name in part}
        none: Json = {name: [] for name in logprobs}
        yield self.write("response.content_part.added", **about, part=part | {"text": ""} | none)
        for piece in text_pieces(part["text"]):
            yield self.write(f"{kind}.delta", **about, delta=piece, **none)
        yield self.write(f"{kind}.done", **about, text=part["text"], **logprobs)
        yield self.write("response.content_part.done", **about, part=part)


def _response(response_id: str, created_at: float, model: str) -> Json:
    """A response in progress, with every field that clients expect of one."""
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


def _items(answer: ModelAnswer, status: str) -> list[Json]:
    """The reply as items: its reasoning, its text, its calls; an empty text stands for a reply without a call."""
    turn, response_id = answer.turn, answer.response_id
    reply, forms = turn.reply, turn.notes.get(CALL_FORMS, {})
    items: list[Json] = []
    if reasoning := reply.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": reasoning}
        sealed = {"summary": [], "content": [part], "encrypted_content": seal_reasoning(reasoning)}
        items.append({"id": f"rs_{response_id}", "type": "reasoning", "status": status, **sealed})
    calls = reply.get("tool_calls") or ()
    content = reply.get("content") or ""
    if content or not calls:
        logprobs = logprob_entries(answer) if answer.request.wants_logprobs else []
        part = {"type": "output_text", "text": content, "annotations": [], "logprobs": logprobs}
        head = {"id": f"msg_{response_id}", "type": "message", "status": status}
        items.append({**head, "role": "assistant", "content": [part]})
    return items + [call_item(call, forms, f"{response_id}_{i}") for i, call in enumerate(calls)]
