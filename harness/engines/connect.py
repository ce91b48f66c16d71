"""From the name of an engine, as it stands on a command line or in a scenario, to its provider.

`local` and `scripted` run in this process. `sglang=URL[,URL]` and `vllm=URL[,URL]` name servers; several of them are a
pool; without a URL they name a server that is yet to be started. A name this version has no provider for is refused
here, before anything starts.
"""

import os
from pathlib import Path
from typing import NamedTuple

from harness.credentials import without_userinfo
from harness.engines.base import TokenProvider
from harness.engines.remote.address import EngineAddress
from harness.engines.repeat_guard import wanted_guard
from harness.engines.scripted import Script, ScriptedEngine
from harness.errors import ScenarioError
from harness.tokens.tokenizer import Tokenizer
from server_patch.repeat_terminate import RepeatTerminateConfig

ENGINES = ("local", "scripted", "sglang=URL[,URL]", "vllm=URL[,URL]")

_SERVERS = ("sglang", "vllm")


class EngineName(NamedTuple):
    """The parts of a name."""

    kind: str
    """`local`, `scripted`, `sglang` or `vllm`."""
    urls: tuple[str, ...] = ()
    """Of servers; none when the engine runs here or is yet to be started."""

    @classmethod
    def parse(cls, name: str) -> "EngineName":
        """The parts of `name`. Raises `ScenarioError` when there is no such engine or an address is none."""
        kind, has_urls, urls = name.partition("=")
        if kind in _SERVERS:
            return cls(kind, _urls(kind, urls) if has_urls else ())
        if kind in ("local", "scripted") and not has_urls:
            return cls(kind)
        raise ScenarioError(
            f"no engine {without_userinfo(name)!r} in this version; expected one of {', '.join(ENGINES)}"
        )

    @property
    def needs_server(self) -> bool:
        """Whether a server has to be started before a provider can be opened."""
        return self.kind in _SERVERS and not self.urls


def open_engine(
    name: str,
    *,
    model_dir: Path | None = None,
    tokenizer: Tokenizer | None = None,
    script: Path | None = None,
    repeat_guard: RepeatTerminateConfig | None = None,
    engine_key: str = "",
) -> TokenProvider:
    """The provider called `name`; enter it to start or to reach it.

    `local` needs `model_dir`, every other one needs `tokenizer`; `scripted` plays `script` when there is one. Both run
    `repeat_guard` (None: that of the environment); servers were started with theirs, which must be this one.
    `engine_key` is sent to servers without a key of their own; empty takes that of the environment. Raises
    `ScenarioError` when the name is unknown or what it needs is missing.
    """
    engine = EngineName.parse(name)
    match engine.kind:
        case "local":
            return _local(model_dir, repeat_guard)
        case "scripted":
            script_or_none = None if script is None else Script.load(script)
            guard = wanted_guard(repeat_guard, os.environ)
            return ScriptedEngine(_required(tokenizer, engine.kind), script_or_none, repeat_guard=guard)
        case _:
            return _servers(engine, _required(tokenizer, engine.kind).vocab_size, repeat_guard, engine_key)


def _local(model_dir: Path | None, repeat_guard: RepeatTerminateConfig | None) -> TokenProvider:
    if model_dir is None:
        raise ScenarioError("the local engine needs weights; pass --model NAME_OR_DIR")
    from harness.engines.huggingface import HuggingFaceTokenProvider  # torch and transformers: seconds to import

    return HuggingFaceTokenProvider(model_dir, repeat_guard=repeat_guard)


def _servers(
    engine: EngineName, vocab_size: int, repeat_guard: RepeatTerminateConfig | None, engine_key: str
) -> TokenProvider:
    if engine.needs_server:
        raise ScenarioError(
            f"{engine.kind} needs the address of a server: {engine.kind}=http://127.0.0.1:30000;"
            f" `harness engine up {engine.kind}` starts one"
        )
    # aiohttp takes a third of a second to import, which `--help` and the engines in this process need not pay.
    from harness.engines.pool.pool import EnginePool

    workers = [open_server(engine.kind, url, vocab_size, repeat_guard, engine_key) for url in engine.urls]
    return workers[0] if len(workers) == 1 else EnginePool(workers)


def open_server(
    kind: str, url: str, vocab_size: int, repeat_guard: RepeatTerminateConfig | None = None, api_key: str = ""
) -> TokenProvider:
    """The provider for the server at `url`, a `sglang` or `vllm`, which must run `repeat_guard` when one is stated.

    `url` may name a key of its own, `api_key` is for one that does not; see `EngineAddress`.
    """
    from harness.engines.remote.sglang import SGLangTokenProvider
    from harness.engines.remote.vllm import VLLMTokenProvider

    provider = SGLangTokenProvider if kind == "sglang" else VLLMTokenProvider
    return provider(url, vocab_size=vocab_size, repeat_guard=repeat_guard, api_key=api_key)


def _urls(kind: str, text: str) -> tuple[str, ...]:
    urls = tuple(url.strip() for url in text.split(",") if url.strip())
    for url in urls:
        EngineAddress.parse(url)
    if not urls:
        raise ScenarioError(f"{kind} needs the address of a server: {kind}=http://127.0.0.1:30000")
    return urls


def _required(tokenizer: Tokenizer | None, kind: str) -> Tokenizer:
    if tokenizer is None:
        raise ScenarioError(f"the {kind} engine needs a tokenizer; pass --tokenizer DIR or --model")
    return tokenizer
