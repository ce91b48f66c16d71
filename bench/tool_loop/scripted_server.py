"""A session server before a scripted engine, for a process that a benchmark starts for it alone."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.machine.memory import settle
from harness.server.serving import SWITCH_S, RunningServer, serve
from harness.server.settings import ServerSettings
from harness.server.store.connect import open_store
from harness.server.telemetry.logging import configure_logging
from harness.tokens.model_family import open_chat_tokenizer


@asynccontextmanager
async def scripted_server(
    tokenizer: Path, text: str, store: str | Path, settings: ServerSettings, *, context_length: int = 1 << 20
) -> AsyncIterator[RunningServer]:
    """A session server before an engine that says `text`, set up as by `harness serve`."""
    configure_logging("error")
    chat_tokenizer = open_chat_tokenizer(tokenizer)
    script = Script((ScriptStep(text=text),))
    engine = ScriptedEngine(chat_tokenizer.tokenizer, script, context_length=context_length)
    sys.setswitchinterval(SWITCH_S)
    async with serve(engine, chat_tokenizer, open_store(store), settings) as running_server:
        settle()
        yield running_server
