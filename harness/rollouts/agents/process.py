"""An agent's process and everything it starts: its group, and daemons that left it, ended as a whole.

Group members are always reaped. Daemons are found by a mark in their environment; see `machine.group_reaper`.
"""

import asyncio
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self
from uuid import uuid4

from harness.machine.deadlines import within
from harness.machine.group_reaper import MARK, signal_group, signal_marked
from harness.machine.log import get_logger
from harness.machine.process_group import WAIT_FOR_START, WAIT_FOR_TERMINAL, is_gone, running_members
from harness.machine.watchdog import Watchdog
from harness.rollouts.agents.agent_output import AgentLog

AGENT_NOT_REAPED = "agent_not_reaped"

_log = get_logger(__name__)

_POLL_S = 0.01
_MAX_POLL_S = 0.3
_REAP_TIMEOUT_S = 5.0  # a process that the kernel holds (a dead network disk) cannot be killed
_LAST_OUTPUT_TIMEOUT_S = 1.0  # a process that left the group may hold the pipe open for ever


class AgentProcess:
    """A running agent. The caller owns it until `stop` returns or raises."""

    def __init__(
        self, process: asyncio.subprocess.Process, mark: str, output: "AgentOutput", watchdog: Watchdog
    ) -> None:
        self._process = process
        self._mark = mark
        self._output = output
        self._watchdog = watchdog

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        env: Mapping[str, str],
        workdir: Path,
        *,
        log: AgentLog,
        watchdog: Watchdog,
        terminal: Path | None = None,
    ) -> Self:
        """Run `command` in `workdir` with exactly `env` and the mark, on `terminal` if given.

        Raises `OSError` or `ValueError` if it cannot (for example, too large an environment), and leaves nothing
        behind.
        """
        with ExitStack() as ours, ExitStack() as on_failure:
            output, mark = await AgentOutput.open(log), uuid4().hex
            ours.callback(os.close, output.writer)
            on_failure.callback(output.close)
            start_line, gate = os.pipe()
            ours.callback(os.close, start_line)
            ours.callback(os.close, gate)
            # The process begins as a shell that waits for a line on standard input and only then becomes the agent. Its
            # group is registered with the watchdog before the line is written, so `kill -9` of the harness never leaves
            # an agent behind: without the line the shell reads end of file and exits. The shell may change the
            # environment (it drops names that are no identifiers and adds `PWD`). The agent's standard input is empty.
            held = (WAIT_FOR_START, "sh") if terminal is None else (WAIT_FOR_TERMINAL, str(terminal))
            process = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", *held, *command),
                stdin=start_line,
                stdout=output.writer,
                stderr=output.writer,
                env={**env, MARK: mark},
                cwd=workdir,
                start_new_session=True,
            )
            watchdog.watch(process.pid, mark)
            # The shell may have died already; `wait` reports that.
            with suppress(BrokenPipeError):
                os.write(gate, b"\n")
            on_failure.pop_all()
        return cls(process, mark, output, watchdog)

    @property
    def group(self) -> int:
        """Process group id: the first process's pid."""
        return self._process.pid

    async def wait(self) -> int:
        """Return the exit code, or minus the number of a signal."""
        return await self._process.wait()

    async def stop(self, *, grace_s: float) -> list[int]:
        """End all: SIGTERM, `grace_s` to obey, SIGKILL. Return the ids of processes that the kernel did not end."""
        has_ended = False
        try:
            self.signal(signal.SIGTERM)
            await self._signal_marked(signal.SIGTERM, told=[self.group])
            has_ended = await within(grace_s, self._end_of_all())
        finally:
            try:
                if not has_ended:  # a cancelled call still sends SIGKILL
                    self.signal(signal.SIGKILL)
                    signal_marked({self._mark}, signal.SIGKILL)
            finally:
                left = await self._finish(has_ended=has_ended)
        return left

    async def _finish(self, *, has_ended: bool) -> list[int]:
        left: list[int] = []
        try:
            async with asyncio.timeout(_REAP_TIMEOUT_S):
                if not has_ended:
                    await self._end_of_all(signal.SIGKILL)
            await self._output.drain()
        except TimeoutError:
            left = sorted({*running_members(self.group), *await self._signal_marked(0)})
            _log.warning(AGENT_NOT_REAPED, pid=self.group, left=left)
        finally:
            self._output.close()
            self._watchdog.forget(self.group)
        return left

    async def _end_of_all(self, number: int = 0) -> None:
        """Wait until nothing is left. Daemons get signal `number` at each look: they may start others meanwhile."""
        # Orphans of the group whose new parent is this process are reaped too (`process_group.py`). The kernel reports
        # no event for the end of a group, and polling is not free.
        await self._process.wait()
        pause_s = _POLL_S
        while not is_gone(self.group) or await self._signal_marked(number):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)

    async def _signal_marked(self, number: int, told: Collection[int] = ()) -> list[int]:
        # Reading the environments of thousands of processes would stall the event loop.
        return await asyncio.to_thread(signal_marked, {self._mark}, number, told)

    def signal(self, number: int) -> bool:
        """Send a signal to the group. Return whether any process could receive it."""
        return signal_group(self.group, number)


class AgentOutput(asyncio.Protocol):
    """Pipe of an agent's output into its log."""

    def __init__(self, log: AgentLog, writer: int) -> None:
        self._log = log
        self._closed = asyncio.get_running_loop().create_future()  # by the last writer, or by `close`
        self.writer = writer
        """Write end, which the starter of the agent closes here."""

    @classmethod
    async def open(cls, log: AgentLog) -> Self:
        reader, writer = os.pipe()
        with ExitStack() as on_failure:
            on_failure.callback(os.close, writer)
            file = on_failure.enter_context(os.fdopen(reader, "rb", buffering=0))
            _, output = await asyncio.get_running_loop().connect_read_pipe(lambda: cls(log, writer), file)
            on_failure.pop_all()
        return output

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._log.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # asyncio's signature
        if not self._closed.done():
            self._closed.set_result(None)

    async def drain(self) -> None:
        """Wait a limited time for all output."""
        await asyncio.wait({self._closed}, timeout=_LAST_OUTPUT_TIMEOUT_S)

    def close(self) -> None:
        """Stop reading. Idempotent."""
        self._transport.close()
