"""Real client libraries as processes: programs with a PEP 723 header that play one conversation."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harness.engines.scripted import ScriptStep
from harness.rollouts.agents.programs import prepare_agent
from harness.rollouts.client.session_server import SessionHandle

PROGRAMS = Path(__file__).parent / "programs"
ANSWERS = ["It is 9.", "Yes."]
PATIENCE_S = 60  # several interpreters start at once on few cores


class ClientLibrary(NamedTuple):
    """A client library, and whether it asks for streamed answers."""

    program: str
    package: str
    streams: bool

    @property
    def script(self) -> Path:
        """The program that plays with it."""
        return PROGRAMS / f"{self.program}.py"

    @property
    def version(self) -> str:
        """The version that the program pins."""
        found = re.search(r'"[\w\[\]-]+==([\w.]+)"', self.script.read_text(encoding="utf-8"))
        assert found is not None, self.script
        return found.group(1)


PACKAGES = {"openai_2": "openai", "openai_3": "openai", "anthropic_2": "anthropic", "google_genai_3": "google-genai"}
LIBRARIES = tuple(
    ClientLibrary(program, package, streams) for program, package in PACKAGES.items() for streams in (False, True)
)


def call(a: int, b: int) -> ScriptStep:
    """A turn that calls the tool."""
    return ScriptStep(text=f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>')


SCRIPT = (call(2, 3), call(5, 4), *(ScriptStep(text=answer) for answer in ANSWERS))
"""What the model says in the four turns of a conversation."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a program ended."""

    exit_code: int
    answers: list[str]
    """What it was told; empty when it did not come to its end."""
    at: float
    """When, on the monotonic clock."""
    said: str
    """Everything on its standard error."""


class Player:
    """A running program."""

    def __init__(self, process: asyncio.subprocess.Process, session_id: str) -> None:
        self._process = process
        self.session_id = session_id

    async def reaches_tool(self) -> None:
        """Return once the program waits in its tool."""
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            line = await self._process.stdout.readline()
        assert line == b"in the tool\n", (line, await self._rest())

    def leaves_tool(self, times: int = 1) -> None:
        """Let the tool answer, this time and `times - 1` further ones."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n" * times)

    async def ends(self, within_s: float) -> Ending:
        """How the program ends; `TimeoutError` when it does not."""
        async with asyncio.timeout(within_s):
            output, errors = await self._process.communicate()
        lines = output.decode().splitlines()
        answers = json.loads(lines[-1]) if self._process.returncode == 0 else []
        return Ending(self._process.returncode or 0, answers, time.monotonic(), errors.decode())

    async def _rest(self) -> str:
        assert self._process.stderr is not None
        return (await self._process.stderr.read()).decode()


Command = tuple[str, ...]


async def prepare_cast(libraries: Sequence[ClientLibrary]) -> dict[ClientLibrary, Command]:
    """How to start each program; the environments are in uv's cache afterwards."""
    agents = await asyncio.gather(*(prepare_agent(library.script) for library in libraries))
    return {library: agent.command for library, agent in zip(libraries, agents, strict=True)}


def variables_of(url: str, key: str) -> dict[str, str]:
    """How client libraries find the session at `url`."""
    variables = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"), key)
    variables |= dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), f"{url}/v1")
    variables |= dict.fromkeys(("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE", "GOOGLE_GEMINI_BASE_URL"), url)
    return {**variables, "NO_PROXY": "127.0.0.1"}


@asynccontextmanager
async def playing(
    library: ClientLibrary, command: Command, session: SessionHandle, witness_url: str
) -> AsyncIterator[Player]:
    """The program of `library`, talking to `session` through the witness; nothing of it outlives the block."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={
            **{name: os.environ[name] for name in ("PATH", "HOME")},
            **variables_of(f"{witness_url}/sessions/{session.session_id}", session.api_key),
            "LOOP": "openai_loop",
            "OPENAI_MODEL": "scripted",
            "CLIENT_STREAMS": str(int(library.streams)),
        },
        start_new_session=True,
    )
    try:
        yield Player(process, session.session_id)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()
