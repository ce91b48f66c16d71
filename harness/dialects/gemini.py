"""Answers of Gemini's `generateContent`: whole, as a stream of answers, or as an error.

A reply is parts: thoughts for clients that ask for them, text, and function calls. A signature on the first call, or on
the text, names the recorded reply. The parts of a stream add up to the whole answer, whose last piece has the finish
reason and the usage.
"""

from collections.abc import Iterator, Mapping

import msgspec

from harness.dialects.gemini_contents import sign
from harness.dialects.gemini_request import ARRAY, COUNT, NAME, parse_request
from harness.dialects.model_request import AnswerHead, ModelAnswer, Said
from harness.dialects.sse import event, text_pieces
from harness.errors import HarnessError, PromptTooLong, RequestError
from harness.tokens.parsing import Delta
from harness.turn_ends import TURN_ENDS
from harness.types import Json
from server_patch.repeat_terminate.signals import signal

_FINISH_REASONS: Mapping[str | None, str] = {
    "stop": "STOP",
    "tool_calls": "STOP",
    "length": "MAX_TOKENS",
    "abort": "OTHER",
}
_STATUSES: Mapping[int, str] = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    502: "INTERNAL",
    503: "UNAVAILABLE",
}
_ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"


class Gemini:
    """`CountingDialect` of the `google-genai` SDKs and gemini-cli."""

    name = NAME
    path = "/{version}/models/{model}:{method}"
    count_path = f"/{{version}}/models/{{model}}:{COUNT}"
    stored_path: str | None = None
    parse = staticmethod(parse_request)

    def client_variables(self, session_url: str, api_key: str, model: str) -> dict[str, str]:
        """See `Dialect`. Clients append version and path to the address; gemini-cli reads the name of the model."""
        return {"GOOGLE_GEMINI_BASE_URL": session_url, "GEMINI_API_KEY": api_key, "GEMINI_MODEL": model}

    def answer(self, answer: ModelAnswer) -> Json:
        turn = answer.turn
        candidate: Json = {
            "content": {"role": "model", "parts": list(_parts(answer))},
            "finishReason": _FINISH_REASONS[TURN_ENDS[turn.end].finish_reason],
            "index": 0,
        }
        if answer.request.wants_logprobs:
            candidate["logprobsResult"] = _logprobs_result(answer)
        output = int(turn.output_ids.size)
        usage = {
            "promptTokenCount": turn.prompt_length,
            "candidatesTokenCount": output,
            "totalTokenCount": turn.prompt_length + output,
            "cachedContentTokenCount": turn.notes.cached_tokens or 0,
        }
        return {
            "candidates": [candidate],
            "usageMetadata": usage,
            "modelVersion": answer.model,
            "responseId": answer.response_id,
            **(signal(triggered=turn.repeat_terminated) if answer.is_guarded else {}),
        }

    def stream(self, head: AnswerHead) -> "_GeminiStream":
        return _GeminiStream(self, head)

    def error_body(self, error: HarnessError, message: str, request_id: str) -> Json:
        """Return the error object of Google's APIs; the details have our own code."""
        if isinstance(error, PromptTooLong):  # the words of the API
            message = (
                f"The input token count ({error.tokens}) exceeds the maximum number of tokens allowed"
                f" ({error.context_length})."
            )
        facts = {"request_id": request_id}
        if isinstance(error, RequestError) and error.param:
            facts["field"] = error.param
        details = [{"@type": _ERROR_INFO, "reason": error.code, "domain": "harness", "metadata": facts}]
        status = _STATUSES.get(error.status, "INVALID_ARGUMENT")
        return {"error": {"code": error.status, "message": message, "status": status, "details": details}}

    def count_answer(self, tokens: int) -> Json:
        return {"totalTokens": tokens}


def _parts(answer: ModelAnswer) -> Iterator[Json]:
    reply = answer.turn.reply
    reasoning, content, calls = (reply.get(field) or "" for field in ("reasoning_content", "content", "tool_calls"))
    if reasoning and answer.request.wants_reasoning:
        yield _thought(reasoning)
    signature = {"thoughtSignature": sign(answer.response_id)}
    if content or not calls:
        yield {"text": content} | ({} if calls else signature)
    for number, call in enumerate(calls):
        args = msgspec.Raw(call["function"]["arguments"].encode())
        called = {"id": call["id"], "name": call["function"]["name"], "args": args}
        yield {"functionCall": called} | ({} if number else signature)


def _thought(text: str) -> Json:
    return {"text": text, "thought": True}


def _logprobs_result(answer: ModelAnswer) -> Json:
    def entry(token_id: int, logprob: float) -> Json:
        return {"token": answer.token_text(token_id), "tokenId": token_id, "logProbability": logprob}

    turn, top = answer.turn, answer.top_logprobs
    chosen = [entry(*each) for each in zip(turn.output_ids.tolist(), turn.logprobs.tolist(), strict=True)]
    if top is None:
        return {"chosenCandidates": chosen}
    others = [
        {"candidates": [entry(int(other), float(logprob)) for other, logprob in zip(ids, logprobs, strict=True)]}
        for ids, logprobs in zip(top.ids, top.logprobs, strict=True)
    ]
    return {"chosenCandidates": chosen, "topCandidates": others}


class _GeminiStream:
    """Writer of one answer as several, each an event or an element of an array."""

    has_told_id = False  # it is in every piece, and nothing continues from it

    def __init__(self, dialect: Gemini, head: AnswerHead) -> None:
        self._dialect = dialect
        self._head = head
        streaming = head.request.streaming
        self._is_array = streaming is not None and streaming.media_type == ARRAY
        self._has_begun = False
        self._said = Said()

    def keep_alive(self) -> bytes:
        """Return a piece with an empty text: chats of the SDK drop a turn with a piece that has no part."""
        return self._piece({"text": ""})

    def say(self, delta: Delta) -> bytes:
        self._said = self._said.after(delta)
        parts = [{"text": delta.content}] if delta.content else []
        if delta.reasoning and self._head.request.wants_reasoning:
            parts.insert(0, _thought(delta.reasoning))
        return b"".join(map(self._piece, parts))

    def end(self, answer: ModelAnswer) -> Iterator[bytes]:
        whole = self._dialect.answer(answer)
        [candidate] = whole["candidates"]
        *parts, last = self._rest(candidate["content"]["parts"])
        for part in parts:
            yield self._piece(part)
        yield self._write(whole | {"candidates": [candidate | {"content": {"role": "model", "parts": [last]}}]})
        if self._is_array:
            yield b"]"

    def fail(self, error: HarnessError, message: str) -> bytes:
        body = self._dialect.error_body(error, message, self._head.response_id)
        if self._is_array:
            return self._write(body) + b"]"
        # Not an event: clients of the API look for errors in lines between them.
        return msgspec.json.encode(body) + b"\n\n"

    def _rest(self, parts: list[Json]) -> Iterator[Json]:
        for part in parts:
            said = self._said.reasoning if part.get("thought") else self._said.content
            *pieces, last = list(text_pieces(part.get("text", "")[said:])) or [""]
            yield from (_thought(piece) if part.get("thought") else {"text": piece} for piece in pieces)
            # A signature comes with its last piece, which may be empty.
            if "functionCall" in part or last or part is parts[-1]:
                yield {**part, "text": last} if "text" in part else part

    def _piece(self, part: Json) -> bytes:
        content = {"role": "model", "parts": [part]}
        head = {"modelVersion": self._head.model, "responseId": self._head.response_id}
        return self._write({"candidates": [{"content": content, "index": 0}], **head})

    def _write(self, value: Json) -> bytes:
        if not self._is_array:
            return event(value)
        begin, self._has_begun = b",\r\n" if self._has_begun else b"[", True
        return begin + msgspec.json.encode(value)
