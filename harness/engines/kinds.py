"""Table of engine kinds: how each is opened, controlled and examined; see docs/extending.md.

The rows import HTTP clients and torch only when an engine is opened. `lanes.commands` has the table for starting
servers, with the same names.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from harness.decoding import read_json
from harness.engines.base import LogprobScale, TokenProvider
from harness.errors import ScenarioError
from harness.tokens.tokenizer import Tokenizer
from server_patch.repeat_terminate import RepeatTerminateConfig

if TYPE_CHECKING:
    from harness.engines.remote.http_client import EngineClient
    from harness.engines.remote.provider import RemoteProvider
    from harness.engines.remote.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Opening:
    model_dir: Path | None = None
    tokenizer: Tokenizer | None = None
    script: Path | None = None
    repeat_guard: RepeatTerminateConfig | None = None
    """None takes the environment's."""

    def require_tokenizer(self, kind: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ScenarioError(f"the {kind} engine needs a tokenizer; pass --tokenizer DIR or --model")
        return self.tokenizer


class ControlVerb(NamedTuple):
    """POST that controls a server."""

    path: str
    body: Mapping[str, Any]


class PauseQuestion(NamedTuple):
    """GET that reports whether a server is paused."""

    path: str
    read: Callable[[int, bytes], bool | None]
    """Maps status and content to the state; None if unknown."""


class ExaminedServer(NamedTuple):
    engine: str
    protocol: str
    version: str
    provider: "type[RemoteProvider]"
    model: "ServedModel"
    weights: Path
    """Source of its weights, on its machine."""
    generate_route: str
    pause_route: str
    weights_route: str


class OpenServer(Protocol):
    """Creates the provider for the server at `url`; contacts nothing before it is entered.

    For control only, pass a vocabulary that allows every id, a stated scale and a disabled guard: entering then
    generates nothing.
    """

    def __call__(
        self,
        url: str,
        *,
        vocab_size: int,
        logprob_scale: LogprobScale = LogprobScale.RAW,
        api_key: str = "",
        repeat_guard: RepeatTerminateConfig | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> TokenProvider: ...


class Examined(NamedTuple):
    """Examination of a server by `harness engine doctor`."""

    path: str
    """GET that only servers of this kind answer with 200."""
    examine: "Callable[[EngineClient, bytes], Awaitable[ExaminedServer]]"
    """Describes the server from that answer."""


@dataclass(frozen=True, slots=True)
class ServerKind:
    """Engine that serves HTTP in another process."""

    title: str
    open: OpenServer
    abort_all: ControlVerb
    resume: ControlVerb
    paused: PauseQuestion
    examined: "Examined | None" = None


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Engine that runs in this process (`open`) or as servers (`server`)."""

    name: str
    """Word in `--engine`."""
    open: Callable[[Opening], TokenProvider] | None = None
    server: ServerKind | None = None
    plays_script: bool = False
    """True if it needs only the model's tokenizer."""

    @property
    def usage(self) -> str:
        """Form of `--engine`."""
        return self.name if self.server is None else f"{self.name}=URL[,URL]"


def _open_local(given: Opening) -> TokenProvider:
    if given.model_dir is None:
        raise ScenarioError("the local engine needs weights; pass --model NAME_OR_DIR")
    from harness.engines.huggingface import HuggingFaceTokenProvider  # torch and transformers: seconds to import

    return HuggingFaceTokenProvider(given.model_dir, repeat_guard=given.repeat_guard)


def _open_scripted(given: Opening) -> TokenProvider:
    import os

    from harness.engines.repeat_guard import choose_guard
    from harness.engines.scripted import Script, ScriptedEngine

    script = None if given.script is None else Script.load(given.script)
    guard = choose_guard(given.repeat_guard, os.environ)
    return ScriptedEngine(given.require_tokenizer("scripted"), script, repeat_guard=guard)


def _import_on_call(module: str, name: str) -> Callable[..., Any]:
    # Importing providers takes long, and `--help` needs none.
    def call(*arguments: Any, **settings: Any) -> Any:
        return getattr(import_module(module), name)(*arguments, **settings)

    return call


class _VLLMPause(msgspec.Struct):
    is_paused: bool


def _read_vllm_pause(status: int, content: bytes) -> bool | None:
    try:
        return read_json(content, _VLLMPause).is_paused if status == 200 else None
    except msgspec.DecodeError:
        return None


ENGINE_KINDS: dict[str, EngineKind] = {
    kind.name: kind
    for kind in (
        EngineKind("local", open=_open_local),
        EngineKind("scripted", open=_open_scripted, plays_script=True),
        EngineKind(
            "sglang",
            server=ServerKind(
                title="SGLang",
                open=_import_on_call("harness.engines.remote.sglang", "SGLangTokenProvider"),
                abort_all=ControlVerb("/abort_request", {"abort_all": True}),
                resume=ControlVerb("/continue_generation", {}),
                # SGLang is not ready while it is paused.
                paused=PauseQuestion("/ready", lambda status, _: {200: False, 503: True}.get(status)),
                examined=Examined("/model_info", _import_on_call("harness.engines.examine.doctor", "examine_sglang")),
            ),
        ),
        EngineKind(
            "vllm",
            server=ServerKind(
                title="vLLM",
                open=_import_on_call("harness.engines.remote.vllm", "VLLMTokenProvider"),
                abort_all=ControlVerb("/abort_requests", {}),
                resume=ControlVerb("/resume", {}),
                paused=PauseQuestion("/is_paused", _read_vllm_pause),
                examined=Examined("/version", _import_on_call("harness.engines.examine.doctor", "examine_vllm")),
            ),
        ),
    )
}


def server_kinds() -> dict[str, ServerKind]:
    return {kind.name: kind.server for kind in ENGINE_KINDS.values() if kind.server is not None}
