"""Answers of OpenAI Chat Completions: whole, as a stream of chunks, or as an error.

The deltas of a stream add up to the message of the whole answer, character for character. The final chunks come from
the recorded turn, so that an answer cut short by a drain never looks complete.
"""

from collections.abc import Iterator

from harness.dialects.model_request import AnswerHead, ModelAnswer, Said
from harness.dialects.openai_chat_request import NAME, parse_request
from harness.dialects.sse import event, raw_event, text_pieces
from harness.errors import HarnessError, PromptTooLong, RequestError
from harness.tokens.parsing import Delta
from harness.turn_ends import TURN_ENDS
from harness.types import Json, Message
from server_patch.repeat_terminate.signals import signal

DONE = raw_event(b"[DONE]")

_HEAD = ("id", "created", "model")
_ID = "chatcmpl-"
_CHUNK = "chat.completion.chunk"
_FIELDS = ("reasoning_content", "content")  # in the order of a `Delta`
_NOTHING = Said()


class OpenAIChat:
    """Dialect of the `openai` SDKs and most other clients."""

    name = NAME
    path = "/v1/chat/completions"
    stored_path: str | None = None
    parse = staticmethod(parse_request)

    def client_variables(self, session_url: str, api_key: str, model: str) -> dict[str, str]:
        """See `Dialect`. The SDKs, litellm and aider read these."""
        return {
            "OPENAI_BASE_URL": base_url(session_url),
            "OPENAI_API_BASE": base_url(session_url),  # the name litellm and aider know
            "OPENAI_API_KEY": api_key,
            "OPENAI_MODEL": model,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }

    def answer(self, answer: ModelAnswer) -> Json:
        """Return the `chat.completion` object. A retry's differs only in `top_logprobs`."""
        turn = answer.turn
        # In the clients' words: the repeat guard is a length limit.
        finish_reason = TURN_ENDS[turn.end].finish_reason
        choice: Json = {"index": 0, "message": _message(turn.reply), "finish_reason": finish_reason, "logprobs": None}
        if answer.request.wants_logprobs:
            choice["logprobs"] = {"content": logprob_entries(answer)}
        return {
            "id": _ID + answer.response_id,
            "object": "chat.completion",
            "created": int(turn.created_at),
            "model": answer.model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": turn.prompt_length,
                "completion_tokens": turn.output_ids.size,
                "total_tokens": turn.prompt_length + turn.output_ids.size,
                "prompt_tokens_details": {"cached_tokens": turn.notes.cached_tokens or 0},
            },
            **(signal(triggered=turn.repeat_terminated) if answer.is_guarded else {}),
        }

    def stream(self, head: AnswerHead) -> "_ChatStream":
        return _ChatStream(self, head)

    def error_body(self, error: HarnessError, message: str, request_id: str) -> Json:
        """Return the error object that OpenAI clients parse. It has no field for the request id."""
        # Agents recognize these words and shorten the conversation.
        if isinstance(error, PromptTooLong):
            message = (
                f"This model's maximum context length is {error.context_length} tokens. However, your messages resulted"
                f" in {error.tokens} tokens. Please reduce the length of the messages."
            )
        is_of_request = isinstance(error, RequestError)
        kind = "invalid_request_error" if is_of_request else f"{error.cause}_error"
        param = error.param if isinstance(error, RequestError) else None
        return {"error": {"message": message, "type": kind, "param": param, "code": error.code}}


class _ChatStream:
    has_told_id = False  # it is in every chunk, and nothing continues from it

    def __init__(self, dialect: OpenAIChat, head: AnswerHead) -> None:
        self._dialect = dialect
        self._head = head
        self._said = Said()

    def keep_alive(self) -> bytes:
        # Without the role, which comes with the answer because clients join deltas.
        return self._chunk({})

    def say(self, delta: Delta) -> bytes:
        chunks = [] if any(self._said) else [self._chunk({"role": "assistant", "content": None})]
        chunks += [self._chunk({field: text}) for field, text in zip(_FIELDS, delta, strict=True) if text]
        self._said = self._said.after(delta)
        return b"".join(chunks)

    def end(self, answer: ModelAnswer) -> Iterator[bytes]:
        streaming = answer.request.streaming
        wants_usage = streaming is not None and streaming.wants_usage
        for chunk in chunks(self._dialect.answer(answer), wants_usage=wants_usage, said=self._said):
            yield event(chunk)
        yield DONE

    def fail(self, error: HarnessError, message: str) -> bytes:
        return event(self._dialect.error_body(error, message, self._head.response_id)) + DONE

    def _chunk(self, delta: Json) -> bytes:
        head = self._head
        chunk: Json = {"id": _ID + head.response_id, "object": _CHUNK, "created": int(head.created_at)}
        return event(chunk | {"model": head.model, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def _message(reply: Message) -> Message:
    reasoning = reply.get("reasoning_content")
    # Clients know reasoning under two names. Deltas have one: some clients append both, others treat the second as a
    # duplicate and give up.
    return {**reply, "reasoning": reasoning} if reasoning else reply


def base_url(session_url: str) -> str:
    return f"{session_url}/v1"


def chunks(completion: Json, *, wants_usage: bool, said: Said = _NOTHING) -> Iterator[Json]:
    """Yield the chunks of `completion` without text already `said`. The last one has logprobs and extra keys."""
    head = {"object": _CHUNK, **{key: completion[key] for key in _HEAD}}
    usage = {"usage": None} if wants_usage else {}
    choice = completion["choices"][0]
    message = choice["message"]
    is_null = message["content"] is None
    deltas: list[Json] = [] if any(said) else [{"role": message["role"], "content": None if is_null else ""}]
    if any(said) and not said.content and not is_null:
        deltas.append({"content": ""})
    for field, before in zip(_FIELDS, said, strict=True):
        deltas += [{field: piece} for piece in text_pieces((message.get(field) or "")[before:])]
    for index, call in enumerate(message.get("tool_calls", ())):
        deltas.append({"tool_calls": [{"index": index, **call, "function": call["function"] | {"arguments": ""}}]})
        pieces = text_pieces(call["function"]["arguments"])
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in pieces]
    for delta in deltas:
        yield head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}]} | usage
    finish = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": choice["logprobs"]}
    beyond = {key: value for key, value in completion.items() if key not in ("object", "choices", "usage", *_HEAD)}
    yield beyond | head | {"choices": [finish]} | usage
    if wants_usage:
        yield head | {"choices": [], "usage": completion["usage"]}


def logprob_entries(answer: ModelAnswer) -> list[Json]:
    """Return the logprobs of every sampled token, including the stop id."""
    turn, top, token_text = answer.turn, answer.top_logprobs, answer.token_text
    entries: list[Json] = []
    for i, token_id in enumerate(turn.output_ids):
        entry = _logprob_entry(token_text(int(token_id)), float(turn.logprobs[i]))
        pairs = () if top is None else zip(top.ids[i], top.logprobs[i], strict=True)
        others = [_logprob_entry(token_text(int(other)), float(logprob)) for other, logprob in pairs]
        entries.append({**entry, "top_logprobs": others})
    return entries


def _logprob_entry(text: str, logprob: float) -> Json:
    return {"token": text, "bytes": list(text.encode()), "logprob": logprob}
