"""The processes of the shards: started, restarted when they die, and ended with the front.

A watchdog ends each shard's process group when the front dies, so a restarted front never meets shards that follow an
earlier one. Any that survive are ended from the directory's record.

A shard that fails its first start ends the front. Later it is restarted, at once and then with growing pauses, with its
store and port.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from harness.decoding import read_json
from harness.errors import CannotListen, HarnessError, ScenarioError, ShardUnavailable, StoreError
from harness.gateway.shards.directory import ShardDirectory
from harness.gateway.shards.shard_client import ShardClient, ShardClients
from harness.machine.deadlines import to_the_end, within
from harness.machine.group_reaper import signal_group
from harness.machine.log import get_logger
from harness.machine.process_group import ProcessName, is_gone
from harness.machine.watchdog import Watchdog
from harness.sessions.gate import Gate
from server_patch.background import running

START_S = 600.0
"""Longest startup of a shard: loading a tokenizer and testing engines takes time."""

_OF_THE_FRONT = ("HARNESS_SHARD", "HARNESS_CONTINUE_ENGINES")  # options of the front, not for shards
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_POLL_S = 0.02
_KILL_S = 5.0  # a process stuck in the kernel cannot be killed

log = get_logger(__name__)


class ShardCommand(NamedTuple):
    arguments: Sequence[str]
    environment: Mapping[str, str]


StartShard = Callable[[int, bool], ShardCommand]
"""Returns the command of a shard, which announces itself in JSON. The flag: resume engines before testing."""


class _Error(msgspec.Struct):
    message: str
    code: str = ""


class _Announcement(msgspec.Struct):
    url: str = ""
    error: _Error | None = None


@dataclass(frozen=True, slots=True)
class Supervisor:
    """Keeps the processes of `links` running."""

    links: ShardClients
    directory: ShardDirectory
    gate: Gate
    start: StartShard
    stop_s: float
    """Longest shutdown."""
    continue_engines: bool
    """True to resume them at the first start."""

    @asynccontextmanager
    async def keep_up(self) -> AsyncIterator[None]:
        """Run every shard within the block; yield once all answer. Raises `ShardUnavailable` if a first start fails."""
        async with AsyncExitStack() as stack:
            watchdog = Watchdog()
            stack.push_async_callback(watchdog.close)
            answer = [asyncio.get_running_loop().create_future() for _ in self.links]
            work = (
                self._keep_one_up(link, watchdog, answers) for link, answers in zip(self.links, answer, strict=True)
            )
            await stack.enter_async_context(running(_all_of(work)))
            await asyncio.gather(*answer)
            yield

    async def _keep_one_up(self, link: ShardClient, watchdog: Watchdog, answers: "asyncio.Future[None]") -> None:
        pause_s, is_our_mistake = _FIRST_PAUSE_S, False
        while True:
            try:
                with ExitStack() as until_it_answers:
                    continues = until_it_answers.enter_context(self._continuing(is_first=not answers.done()))
                    async with self._process(link, self.start(link.number, continues), watchdog) as process:
                        assert process.stdout is not None
                        async with asyncio.timeout(START_S):
                            _check_announcement(await _read_document(process.stdout))
                        until_it_answers.close()
                        link.came_up()
                        if not answers.done():
                            answers.set_result(None)
                        pause_s = _FIRST_PAUSE_S
                        while await process.stdout.read(4096):
                            pass
                        problem = "exited and is restarting"
                        link.went_down(problem)  # at once: another process on its port must not get our token
                log.warning("shard_ended", shard=link.number, code=process.returncode)
            except TimeoutError:
                problem = f"did not answer within {START_S:g} s"
            except HarnessError as error:
                problem, is_our_mistake = error.message, isinstance(error, ScenarioError)
            except OSError as error:
                problem = f"cannot be started: {error.strerror}"
            link.went_down(problem)
            if not answers.done():
                kind = ScenarioError if is_our_mistake else ShardUnavailable
                answers.set_exception(kind(f"shard {link.number}: {problem}"))
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @contextmanager
    def _continuing(self, *, is_first: bool) -> Iterator[bool]:
        # A starting shard cannot test paused engines. It resumes them first in two cases: at the first start if the
        # operator wants it, and when a hold left them paused and no shard is up to resume them. It never does so under
        # a hold that covers engines, and `wakers` keeps such holds from being placed meanwhile.
        gate = self.gate
        is_wanted = is_first and self.continue_engines and not any(hold.engines for hold in gate.holds)
        is_left = gate.must_wake_engines and all(link.counts is None for link in self.links)
        gate.wakers += is_wanted or is_left
        try:
            yield is_wanted or is_left
        finally:
            gate.wakers -= is_wanted or is_left

    @asynccontextmanager
    async def _process(
        self, link: ShardClient, command: ShardCommand, watchdog: Watchdog
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        process = await asyncio.create_subprocess_exec(
            *command.arguments,
            env=command.environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        watchdog.watch(process.pid)
        try:
            self._note(link.number, process.pid)
            yield process
        finally:
            await to_the_end(self._end(process))
            watchdog.forget(process.pid)

    def _note(self, number: int, pid: int) -> None:
        # For the next front, in case this one and its watchdog are both killed.
        try:
            self.directory.note_process(number, ProcessName.of(pid))
        except ProcessLookupError:
            pass
        except StoreError as error:  # a full disk must not end a starting shard
            log.warning("shard_process_not_noted", shard=number, error=error.message)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()
            await within(self.stop_s, process.wait())
        # Processes that the shard started are in its group. All must end before its port and store are reused.
        signal_group(process.pid, signal.SIGKILL)
        await within(_KILL_S, _wait_until_gone(process))


async def _wait_until_gone(process: asyncio.subprocess.Process) -> None:
    await process.wait()
    while not is_gone(process.pid):  # noqa: ASYNC110  # the OS does not report the end of a group
        await asyncio.sleep(_POLL_S)


async def _all_of(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for each in work:
            tasks.create_task(each)


async def _read_document(stream: asyncio.StreamReader) -> bytes:
    """Read one JSON document, up to its closing brace or the end of output."""
    lines: list[bytes] = []
    while line := await stream.readline():
        lines.append(line)
        if line == b"}\n":
            break
    return b"".join(lines)


def _check_announcement(document: bytes) -> None:
    try:
        said = read_json(document or b"{}", _Announcement)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ShardUnavailable(f"announced {document[:100]!r}: {error}") from error
    match said.error:
        case None if said.url:
            return
        case None:
            raise ShardUnavailable("exited before it answered; see its log")
        case _Error(message, ScenarioError.code):
            raise ScenarioError(message)
        case _Error(message, CannotListen.code):
            raise ShardUnavailable(
                f"{message.partition(';')[0]}; addresses of sessions have the port of their shard, so it is kept: free"
                " it, or begin with another --store"
            )
        case _Error(message):
            raise ShardUnavailable(message)


def shard_environment(admin_token: str | None, engine_key: str) -> dict[str, str]:
    """Return the environment of a shard, with the secrets."""
    secrets = {"HARNESS_ADMIN_TOKEN": admin_token or "", "HARNESS_ENGINE_KEY": engine_key}
    others = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_FRONT)}
    return others | {name: value for name, value in secrets.items() if value}
