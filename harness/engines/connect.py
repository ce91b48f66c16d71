"""Parses engine names, as in `--engine` or a scenario, opens their providers, and identifies what they serve.

`local` and `scripted` run in this process. `sglang=URL[,URL]` and `vllm=URL[,URL]` name servers; without a URL, a
server yet to be started.
"""

from pathlib import Path
from typing import NamedTuple

from harness.credentials import without_userinfo
from harness.engines.base import Capabilities, TokenProvider
from harness.engines.kinds import ENGINE_KINDS, Opening, server_kinds
from harness.engines.remote.address import EngineAddress
from harness.errors import ScenarioError
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json
from server_patch.repeat_terminate import RepeatTerminateConfig


class EngineName(NamedTuple):
    kind: str
    """A key of `ENGINE_KINDS`."""
    urls: tuple[str, ...] = ()
    """Server addresses, if any."""

    @classmethod
    def parse(cls, name: str) -> "EngineName":
        """Parse `name`. Raises `ScenarioError` if the engine is unknown or an address is invalid."""
        kind, has_urls, rest = name.partition("=")
        if kind not in ENGINE_KINDS or (has_urls and ENGINE_KINDS[kind].server is None):
            known = ", ".join(each.usage for each in ENGINE_KINDS.values())
            raise ScenarioError(f"no engine {without_userinfo(name)!r} in this version; expected one of {known}")
        if not has_urls:
            return cls(kind)
        urls = tuple(url.strip() for url in rest.split(",") if url.strip())
        for url in urls:
            EngineAddress.parse(url)
        if not urls:
            raise ScenarioError(f"{kind} needs the address of a server: {kind}=http://127.0.0.1:30000")
        return cls(kind, urls)

    @property
    def needs_server(self) -> bool:
        """True if a server must be started first."""
        return ENGINE_KINDS[self.kind].server is not None and not self.urls

    @property
    def plays_script(self) -> bool:
        return ENGINE_KINDS[self.kind].plays_script


def open_engine(
    name: str,
    *,
    model_dir: Path | None = None,
    tokenizer: Tokenizer | None = None,
    script: Path | None = None,
    repeat_guard: RepeatTerminateConfig | None = None,
    engine_key: str = "",
) -> TokenProvider:
    """Create the provider of an engine; entering it starts or contacts the engine.

    Args:
        name: See `EngineName`.
        model_dir: Required for `local`.
        tokenizer: Required for all others; a server must have the same one.
        script: Played by `scripted`.
        repeat_guard: Required of servers, run by others; None takes the environment's.
        engine_key: For servers without their own; empty takes the environment's.

    Raises `ScenarioError` if the name is unknown or a requirement is missing.
    """
    engine = EngineName.parse(name)
    given = Opening(model_dir, tokenizer, script, repeat_guard)
    open_here = ENGINE_KINDS[engine.kind].open
    if open_here is not None:
        return open_here(given)
    vocab_size = given.require_tokenizer(engine.kind).vocab_size
    if engine.needs_server:
        raise ScenarioError(
            f"{engine.kind} needs the address of a server: {engine.kind}=http://127.0.0.1:30000;"
            f" `harness engine up {engine.kind}` starts one"
        )
    open_server = server_kinds()[engine.kind].open
    workers = [
        open_server(url, vocab_size=vocab_size, repeat_guard=repeat_guard, api_key=engine_key, tokenizer=tokenizer)
        for url in engine.urls
    ]
    if len(workers) == 1:
        return workers[0]
    from harness.engines.pool.pool import EnginePool  # imported only where it is used

    return EnginePool(workers)


def serving_identity(capabilities: Capabilities, chat_tokenizer: ChatTokenizer) -> Json:
    """Return the identity of a server, without program versions: equal ones sample the same tokens from messages."""
    return {
        "engine": capabilities.engine,
        "model": capabilities.model,
        "weights_digest": capabilities.weights_digest,
        "tokenizer_digest": chat_tokenizer.tokenizer.digest,
        "template_digest": chat_tokenizer.describe().template_digest,
        "repeat_guard": capabilities.repeat_guard,
    }


def programs_of(engine: TokenProvider) -> list[str]:
    """Return the programs that sample for `engine`, such as `sglang 0.5.15` or `local`."""
    found = [worker.capabilities for worker in engine.workers.providers.values()]
    return sorted({f"{each.engine} {each.version}".rstrip() for each in found})
