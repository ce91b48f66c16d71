"""An engine that notes what controllers ask of it, and fails on cue."""

import asyncio
from pathlib import Path

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from tests.builders import toy_tokenizer

CHECKPOINT = Path("/checkpoint")
"""What an update applies; a scripted engine reads nothing of it."""


class NotingEngine(ScriptedEngine):
    """Notes what is asked of it, and fails on cue."""

    def __init__(self, *steps: ScriptStep, events: list[str] | None = None) -> None:
        super().__init__(toy_tokenizer(), Script(steps or (ScriptStep(text="Understood."),)))
        self.events = [] if events is None else events
        self.may_score = asyncio.Event()
        self.may_score.set()
        self.fails: dict[str, Exception | None] = {}
        """What a verb raises; None: it never returns."""

    async def score(self, input_ids, *, start, session_id=None):
        await self._note("score")
        await self.may_score.wait()
        return await super().score(input_ids, start=start)

    async def pause(self, mode):
        await self._note(f"pause {mode}")
        await super().pause(mode)

    async def update_weights(self, path, version):
        await self._note(f"update {version}")
        await super().update_weights(path, version)

    async def resume(self):
        await self._note("resume")
        await super().resume()

    async def _note(self, event: str) -> None:
        self.events.append(event)
        verb = event.partition(" ")[0]
        if verb in self.fails:
            failure = self.fails[verb]
            await (asyncio.Event().wait() if failure is None else _raise(failure))


async def _raise(error: Exception) -> None:
    raise error
