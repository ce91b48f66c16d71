"""Builders for tests: values with sensible defaults, and a conversation in three words.

Nothing here replaces code of ours: sessions, templates and engines are the real ones, on a tokenizer of 259 ids.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from harness.engines.base import TokenProvider
from harness.engines.scripted import scripted_logprobs
from harness.server.gatekeeper import Gatekeeper
from harness.server.http.connection import ClientConnection
from harness.server.settings import ServerSettings
from harness.server.store.base import SessionStore
from harness.server.telemetry.metrics import ServerMetrics
from harness.server.turns import TurnService
from harness.sessions.continuation import Output
from harness.sessions.lifecycle import end_of_output
from harness.sessions.session import Admission, Session, TurnRequest
from harness.sessions.session_config import SessionConfig
from harness.sessions.turn_outcome import Reply, break_off_turn, end_turn
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.tokens.templates.chat_template import ChatTemplateTokenizer
from harness.tokens.tokenizer import Tokenizer
from harness.types import (
    FinishReason,
    GenerationResult,
    Json,
    Message,
    Sample,
    SampleStatus,
    SamplingWishes,
    Turn,
    VersionSpan,
    as_ids,
    as_logprobs,
)
from tests.toy_model import write_toy_model

EOS = 2
CONTEXT = 100_000


@cache
def toy_template() -> ChatTemplateTokenizer:
    """The harness's own template on the toy tokenizer: bytes as tokens, `<|im_end|>` is id 2."""
    return ChatTemplateTokenizer.load(write_toy_model(Path(_toy_directory().name)))


@cache
def _toy_directory() -> "TemporaryDirectory[str]":
    """The toy tokenizer's folder, which is there as long as the tests."""
    return TemporaryDirectory()


def toy_tokenizer() -> Tokenizer:
    """The toy tokenizer."""
    return toy_template().tokenizer


def user(text: str) -> Message:
    """A user message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """An assistant message without tool calls."""
    return {"role": "assistant", "content": text}


def tool(name: str = "add", **parameters: Any) -> Json:
    """A tool in the OpenAI form."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def body(messages: Sequence[Any], **fields: Any) -> bytes:
    """The body of a chat completion request."""
    return json.dumps({"model": "m", "messages": list(messages), **fields}).encode()


def new_session(**config: Any) -> Session:
    """An open session."""
    return Session("0" * 32, "sk-harness-test", SessionConfig(**config), 1_000.0)


def admit(
    session: Session,
    messages: Sequence[Message],
    *,
    tools: Sequence[Json] = (),
    asked: SamplingWishes | None = None,
    context_length: int = CONTEXT,
) -> Admission:
    """Admit a turn; its context ids are the plain bytes of the new messages."""
    point = session.attach(session.history.read(messages, tuple(tools)), messages)
    delta = tuple(messages[point.matched :])
    context = toy_tokenizer().encode_plain("".join(f"[{message['role']}]{message['content']}" for message in delta))
    request = TurnRequest(delta, as_ids(context), asked or SamplingWishes(), "digest")
    return session.admit(point, request, context_length, 1_001.0)


def finish(
    session: Session,
    admission: Admission,
    text: str = "ok",
    *,
    reason: FinishReason = FinishReason.STOP,
    version: str = "0",
) -> Turn:
    """Record that the engine said `text`."""
    reply = Reply(assistant(text), end_of_output(reason, has_calls=False, is_drained=False, is_stale=False))
    turn = end_turn(admission, output_of(sampled(admission, text, reason=reason, version=version)), reply, 1_002.0)
    session.record(turn)
    return turn


def fail(session: Session, admission: Admission, error: Any) -> Turn:
    """Record that the engine failed."""
    turn = break_off_turn(admission, Output.nothing(), error, 1_002.0)
    session.record(turn)
    return turn


def take_turn(
    session: Session, messages: Sequence[Message], text: str = "ok", *, tools: Sequence[Json] = (), **how: Any
) -> Turn:
    """Admit a turn and record that the engine said `text`."""
    return finish(session, admit(session, messages, tools=tools), text, **how)


def sampled(
    admission: Admission, text: str, *, reason: FinishReason = FinishReason.STOP, version: str = "0"
) -> GenerationResult:
    """What an engine answers that said `text`."""
    ids = toy_tokenizer().encode_plain(text) + ([EOS] if reason is FinishReason.STOP else [])
    output = as_ids(ids)
    return GenerationResult(
        request_id=f"{admission.index:032x}",
        input_ids=admission.prompt_ids,
        output_ids=output,
        logprobs=scripted_logprobs(output, admission.prompt_ids.size, version),
        finish_reason=reason,
        version_spans=(VersionSpan(version, 0, output.size),) if output.size else (),
    )


def sample(**fields: Any) -> Sample:
    """A sample of three prompt tokens and two response tokens."""
    columns: Json = {
        "tokens": as_ids([5, 6, 7, 8, 2]),
        "response_length": 2,
        "loss_mask": np.asarray([1, 1], dtype=np.uint8),
        "rollout_log_probs": as_logprobs([-0.1, -2.0]),
        "status": SampleStatus.COMPLETED,
        "weight_versions": ("0",),
        "behavior_versions": as_ids([0, 0]),
        "proximal_logprobs": as_logprobs([-0.1, -2.0]),
        "proximal_versions": as_ids([0, 0]),
        "metadata": {"session_id": "0" * 32, "turns": [0]},
    }
    return Sample(**columns | fields)


def prompt_of(session: Session, turn: Turn) -> list[int]:
    """Prompt ids of a turn."""
    return [int(token_id) for token_id in session.prompt_ids(turn)]


def tokens_of(session: Session, turn: Turn) -> list[int]:
    """Prompt and output ids of a turn."""
    return prompt_of(session, turn) + turn.output_ids.tolist()


def output_of(*results: GenerationResult) -> Output:
    """The output that the requests `results` of one turn make together."""
    output = Output.nothing()
    for result in results:
        output = output.join(result)
    return output


def turn_service(
    engine: TokenProvider, chat_tokenizer: ChatTokenizer, store: SessionStore, **settings: Any
) -> TurnService:
    """A turn service as a server has it."""
    chosen = ServerSettings(model="m", **settings)
    metrics = ServerMetrics()
    gatekeeper = Gatekeeper(store, metrics, pause_timeout_s=chosen.pause_timeout_s)
    return TurnService(engine, chat_tokenizer, store, metrics, gatekeeper, chosen)


def patient_client() -> ClientConnection:
    """A client that waits for ever and never retries."""
    return ClientConnection(None, {})
