"""The kinds of engines, one row each: how an engine is opened, controlled and examined.

`--engine`, scenarios, aborts, weight updates and the doctor know engines by this table alone, so a further kind is a
provider, what it needs beside that, and a row (docs/extending.md). The rows are light: what imports an HTTP client or
torch is imported by the functions in them, when an engine of the kind is wanted.

How a server of a kind is started is not in it. Lanes stand above engines: they know folders, environments and command
lines of programs, so they keep one table of their own, by the same names (`lanes.commands`).
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from harness.engines.base import LogprobScale, TokenProvider
from harness.errors import ScenarioError
from harness.tokens.tokenizer import Tokenizer
from server_patch.repeat_terminate import RepeatTerminateConfig

if TYPE_CHECKING:
    from harness.engines.examine.doctor import ExaminedServer
    from harness.engines.remote.http_client import EngineClient


@dataclass(frozen=True, slots=True)
class Opening:
    """The means to open an engine; each kind takes what it needs and refuses to go without."""

    model_dir: Path | None = None
    tokenizer: Tokenizer | None = None
    script: Path | None = None
    repeat_guard: RepeatTerminateConfig | None = None
    """None takes that of the environment."""

    def require_tokenizer(self, kind: str) -> Tokenizer:
        """Raises `ScenarioError` when there is none."""
        if self.tokenizer is None:
            raise ScenarioError(f"the {kind} engine needs a tokenizer; pass --tokenizer DIR or --model")
        return self.tokenizer


class ControlVerb(NamedTuple):
    """A request that tells a server what to do; its body is the JSON object."""

    path: str
    body: Mapping[str, Any]


class PauseQuestion(NamedTuple):
    """A GET that tells whether a server is paused."""

    path: str
    read: Callable[[int, bytes], bool | None]
    """From status and content; None when this answer does not say."""


class OpenServer(Protocol):
    """Makes the provider for the server at `url`; nothing is contacted before it is entered.

    A server that is only controlled from here gets a vocabulary that allows every id, a stated scale and a guard that
    is off, so that entering it generates nothing. An empty `api_key` takes that of the environment.
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
    """How `harness engine doctor` finds out that it stands before a server of a kind, and what the server is."""

    path: str
    """A GET of it is answered with 200 by servers of this kind only."""
    examine: "Callable[[EngineClient, bytes], Awaitable[ExaminedServer]]"
    """Reads the server's account of itself; takes its answer at `path`."""


@dataclass(frozen=True, slots=True)
class ServerKind:
    """An engine that serves HTTP, in a process that is not ours."""

    title: str
    """As people write it."""
    open: OpenServer
    abort_all: ControlVerb
    """Ends every request."""
    resume: ControlVerb
    """Ends a pause."""
    paused: PauseQuestion
    examined: "Examined | None" = None
    """None: `harness engine doctor` does not know the kind."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine by its name: it runs in this process (`open`), or as servers (`server`)."""

    name: str
    """The word in `--engine`, alone or before `=URL[,URL]`."""
    open: Callable[[Opening], TokenProvider] | None = None
    server: ServerKind | None = None
    plays_script: bool = False
    """Its answers are those of a script; of a model it needs the tokenizer only."""

    @property
    def usage(self) -> str:
        """For messages."""
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
    """`name` of `module`, imported when it is called.

    Providers bring numpy, an HTTP client, or torch along: `--help` need not pay for importing them.
    """

    def call(*arguments: Any, **settings: Any) -> Any:
        return getattr(import_module(module), name)(*arguments, **settings)

    return call


class _VLLMPause(msgspec.Struct):
    is_paused: bool


def _read_vllm_pause(status: int, content: bytes) -> bool | None:
    """In dev mode vLLM says so; otherwise nobody can pause it."""
    try:
        return msgspec.json.decode(content, type=_VLLMPause).is_paused if status == 200 else None
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
"""By name. Servers whose kind nobody stated are tried in this order."""


class NamedEngine(NamedTuple):
    """`kind=rest`, taken apart."""

    kind: EngineKind
    rest: str | None
    """The text behind the `=`; None without one."""


def parse_kind(text: str) -> NamedEngine | None:
    """The kind that `text` begins with; None when it begins with none, as an address on its own does."""
    name, separator, rest = text.partition("=")
    kind = ENGINE_KINDS.get(name)
    return None if kind is None else NamedEngine(kind, rest if separator else None)


def server_kinds() -> dict[str, ServerKind]:
    """The kinds that are servers, by name, in the order of the table."""
    return {kind.name: kind.server for kind in ENGINE_KINDS.values() if kind.server is not None}
