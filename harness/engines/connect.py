"""From the name of an engine, as it stands on a command line or in a scenario, to its provider.

The kinds are the rows of `kinds.ENGINE_KINDS`. `local` and `scripted` run in this process; `sglang=URL[,URL]` and
`vllm=URL[,URL]` name servers; several of them are a pool; without a URL they name a server that is yet to be started.
A name this version has no provider for is refused here, before anything starts.
"""

from pathlib import Path
from typing import NamedTuple

from harness.credentials import without_userinfo
from harness.engines.base import TokenProvider
from harness.engines.kinds import ENGINE_KINDS, Opening, parse_kind, server_kinds
from harness.engines.remote.address import EngineAddress
from harness.errors import ScenarioError
from harness.tokens.tokenizer import Tokenizer
from server_patch.repeat_terminate import RepeatTerminateConfig


class EngineName(NamedTuple):
    """The parts of a name."""

    kind: str
    """A key of `ENGINE_KINDS`."""
    urls: tuple[str, ...] = ()
    """Of servers; none when the engine runs here or is yet to be started."""

    @classmethod
    def parse(cls, name: str) -> "EngineName":
        """The parts of `name`. Raises `ScenarioError` when there is no such engine or an address is none."""
        named = parse_kind(name)
        if named is None or (named.kind.server is None and named.rest is not None):
            known = ", ".join(kind.usage for kind in ENGINE_KINDS.values())
            raise ScenarioError(f"no engine {without_userinfo(name)!r} in this version; expected one of {known}")
        kind = named.kind.name
        if named.rest is None:
            return cls(kind)
        urls = tuple(url.strip() for url in named.rest.split(",") if url.strip())
        for url in urls:
            EngineAddress.parse(url)
        if not urls:
            raise ScenarioError(f"{kind} needs the address of a server: {kind}=http://127.0.0.1:30000")
        return cls(kind, urls)

    @property
    def needs_server(self) -> bool:
        """Whether a server has to be started before a provider can be opened."""
        return ENGINE_KINDS[self.kind].server is not None and not self.urls

    @property
    def plays_script(self) -> bool:
        """Whether the engine's answers are those of a script; of a model it needs the tokenizer only."""
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
    """The provider called `name`; enter it to start or to reach it.

    `local` needs `model_dir`, every other one needs `tokenizer`; `scripted` plays `script` when there is one. Both run
    `repeat_guard` (None: that of the environment); servers were started with theirs, which must be this one, as their
    tokenizer must be `tokenizer`: entering the provider asks them.
    `engine_key` is sent to servers without a key of their own; empty takes that of the environment. Raises
    `ScenarioError` when the name is unknown or what it needs is missing.
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
    workers = [
        open_server(engine.kind, url, vocab_size, repeat_guard, engine_key, tokenizer=tokenizer) for url in engine.urls
    ]
    if len(workers) == 1:
        return workers[0]
    from harness.engines.pool.pool import EnginePool  # which an engine on its own need not pay

    return EnginePool(workers)


def open_server(
    kind: str,
    url: str,
    vocab_size: int,
    repeat_guard: RepeatTerminateConfig | None = None,
    api_key: str = "",
    *,
    tokenizer: Tokenizer | None = None,
) -> TokenProvider:
    """The provider for the server of `kind` at `url`, which must run `repeat_guard` and have `tokenizer` where stated.

    `url` may name a key of its own, `api_key` is for one that does not; see `EngineAddress`.
    """
    server = server_kinds()[kind]
    return server.open(url, vocab_size=vocab_size, repeat_guard=repeat_guard, api_key=api_key, tokenizer=tokenizer)
