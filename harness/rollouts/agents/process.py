"""An agent's process and everything it starts: one process group, ended as a whole and always reaped."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from harness.machine.deadlines import within
from harness.machine.log import get_logger
from harness.machine.process_group import is_gone, signal_group
from harness.machine.process_name import WAIT_FOR_START
from harness.machine.watchdog import Watchdog
from harness.rollouts.agents.log import AgentLog, LogPipe

AGENT_NOT_REAPED = "agent_not_reaped"

_log = get_logger(__name__)

_POLL_S = 0.01
_MAX_POLL_S = 0.3
_REAP_TIMEOUT_S = 5.0  # a process that the kernel holds (a dead network disk) cannot be killed
_LAST_OUTPUT_TIMEOUT_S = 1.0  # a process that left the group may hold the pipe open for ever


class AgentProcess:
    """A running agent. The caller owns it until `stop` returns or raises."""

    def __init__(self, process: asyncio.subprocess.Process, output: "AgentOutput", watchdog: Watchdog) -> None:
        self._process = process
        self._output = output
        self._watchdog = watchdog

    @classmethod
    async def start(
        cls, command: Sequence[str], *, env: Mapping[str, str], workdir: Path, log: AgentLog, watchdog: Watchdog
    ) -> Self:
        """Run `command` in `workdir` with exactly `env`.

        Raises `OSError` or `ValueError` if it cannot (for example, too large an environment), and leaves nothing
        behind.
        """
        with ExitStack() as ours, ExitStack() as on_failure:
            output = await AgentOutput.open(log)
            ours.callback(os.close, output.writer)
            on_failure.callback(output.close)
            start_line, gate = os.pipe()
            ours.callback(os.close, start_line)
            ours.callback(os.close, gate)
            # The process begins as a shell that waits for a line on standard input and only then becomes the agent. Its
            # group is registered with the watchdog before the line is written, so `kill -9` of the harness never leaves
            # an agent behind: without the line the shell reads end of file and exits. The shell may change the
            # environment (it drops names that are no identifiers and adds `PWD`). The agent's standard input is empty.
            process = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", WAIT_FOR_START, "sh", *command),
                stdin=start_line,
                stdout=output.writer,
                stderr=output.writer,
                env=env,
                cwd=workdir,
                start_new_session=True,
            )
            watchdog.watch(process.pid)
            # The shell may have died already; `wait` reports that.
            with suppress(BrokenPipeError):
                os.write(gate, b"\n")
            on_failure.pop_all()
        return cls(process, output, watchdog)

    @property
    def group(self) -> int:
        """Process group id: the first process's pid."""
        return self._process.pid

    async def wait(self) -> int:
        """Return the exit code, or minus the number of a signal."""
        return await self._process.wait()

    async def stop(self, *, grace_s: float) -> None:
        """End the group: SIGTERM, `grace_s` to obey, SIGKILL. Then the agent is reaped and its log complete."""
        has_ended = False
        try:
            self.signal(signal.SIGTERM)
            has_ended = await within(grace_s, self._end_of_group())
        finally:
            # A cancelled call still sends SIGKILL.
            if not has_ended:
                self.signal(signal.SIGKILL)
            await self._finish()

    async def _finish(self) -> None:
        try:
            async with asyncio.timeout(_REAP_TIMEOUT_S):
                await self._end_of_group()
            await self._output.drain()
        except TimeoutError:
            _log.warning(AGENT_NOT_REAPED, pid=self.group)
        finally:
            self._output.close()
            self._watchdog.forget(self.group)

    async def _end_of_group(self) -> None:
        # Orphans of the group whose new parent is this process are reaped too (`process_group.py`). The kernel reports
        # no event for the end of a group, and polling is not free.
        await self._process.wait()
        pause_s = _POLL_S
        while not is_gone(self.group):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)

    def signal(self, number: int) -> bool:
        """Send a signal to the group. Return whether any process could receive it."""
        return signal_group(self.group, number)


class AgentOutput:
    """Pipe of an agent's output into its log."""

    def __init__(self, transport: asyncio.ReadTransport, pipe: LogPipe, writer: int) -> None:
        self._transport = transport
        self._pipe = pipe
        self.writer = writer
        """Write end, which the starter of the agent closes here."""

    @classmethod
    async def open(cls, log: AgentLog) -> Self:
        """Open a pipe that ends in `log`."""
        reader, writer = os.pipe()
        with ExitStack() as on_failure:
            on_failure.callback(os.close, writer)
            file = on_failure.enter_context(os.fdopen(reader, "rb", buffering=0))
            transport, pipe = await asyncio.get_running_loop().connect_read_pipe(lambda: LogPipe(log), file)
            on_failure.pop_all()
        return cls(transport, pipe, writer)

    async def drain(self) -> None:
        """Wait a limited time for all output."""
        await asyncio.wait({self._pipe.closed}, timeout=_LAST_OUTPUT_TIMEOUT_S)

    def close(self) -> None:
        """Stop reading. Idempotent."""
        self._transport.close()
