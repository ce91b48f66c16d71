"""Containers of podman or docker, by the command line that both share.

A container outlives its commands and a killed manager; `boxed.py` finds it by its label. Settings of the machine
(runtime, storage, address of a daemon) stay in the engine's own configuration.
"""

import asyncio
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from errno import ENAMETOOLONG
from pathlib import Path
from signal import SIGKILL, SIGTERM

from harness.errors import SandboxFailed
from harness.machine.deadlines import to_the_end, within
from harness.machine.program import Ended
from harness.rollouts.sandboxes.sandbox import Place, RunningCommand, StartOnHost, call, describe_full_disk
from harness.rollouts.sandboxes.spec import Mount, SandboxSpec

BOX_LABEL = "harness.sandbox"
ROLLOUT_LABEL = "harness.rollout"

_PULL_S = 600.0  # an image may be pulled first
_CALL_S = 30.0
_REMOVE_S = 60.0

# Of the container itself. It ignores the signals that all of its processes get; its `sleep` is restarted.
_KEEPER = 'trap "" TERM INT HUP QUIT USR1 USR2 ALRM; while :; do sleep 3600; done'
_VARIABLES = "variables.sh"
_ENTER = 'command . "$1" && cd "$2" || exit 125; shift 2; exec "$@"'
_OOM_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


class ContainerSandbox:
    has_own_network = True

    def __init__(self, spec: SandboxSpec, place: Place) -> None:
        self._spec = spec
        self._place = place
        self._user: tuple[int, int] | None = None
        self._is_running = False

    async def start(self) -> None:
        assert self._spec.image is not None
        await self._require("create", *self._options(), self._spec.image, "sh", "-c", _KEEPER, deadline_s=_PULL_S)
        await self._start()
        user = await self.ask("exec", self._place.name, "sh", "-c", "id -u; id -g")
        match user.output.split():
            case [uid, gid] if uid.isdecimal() and gid.isdecimal() and uid != "0" and not os.getuid():
                self._user = int(uid), int(gid)

    async def exec(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, on_host: StartOnHost
    ) -> RunningCommand:
        # No command line shows the variables, which hold the session's key; `--env-file` knows no lines in a value.
        variables = self._place.folder / _VARIABLES
        try:
            await asyncio.to_thread(_write_variables, variables, env)
            if self._user is not None:
                await asyncio.to_thread(_give, self._place.workdir, *self._user)
        except OSError as error:
            raise SandboxFailed(f"the files of the sandbox cannot be made: {error}") from error
        await self._start()
        entered = ("exec", self._place.name, "sh", "-c", _ENTER, "sh", str(variables), str(cwd))
        client = await on_host((self._spec.kind, *entered, *command), os.environ, self._place.folder.parent)
        return ContainerCommand(self, client)

    async def put(self, source: Path, target: Path) -> None:
        await self._require("cp", str(source), f"{self._place.name}:{target}", deadline_s=_PULL_S)

    async def get(self, source: Path, target: Path) -> None:
        await self._require("cp", f"{self._place.name}:{source}", str(target), deadline_s=_PULL_S)

    async def find_failure(self) -> str | None:
        if await self._has_hit_memory_limit():
            return f"the memory limit of {self._spec.memory_mb} MB killed it; set a larger memory_mb"
        # A container that has exited was ended from inside: an agent may kill all of its processes.
        state = await self.ask("inspect", "--format", "{{.State.OOMKilled}}", self._place.name)
        if state.code:
            return f"the container is gone: {state.messages.strip()[-300:]}"
        if state.output.strip() == "true":
            return "this machine's memory ran out; set memory_mb, or run fewer rollouts at once"
        return await asyncio.to_thread(describe_full_disk, self._place.workdir)

    async def stop(self) -> None:
        ended = await self.ask("rm", "--force", "--volumes", self._place.name, deadline_s=_REMOVE_S)
        if ended.code and "no such container" not in ended.messages.lower():
            raise SandboxFailed(f"{self._place.name} could not be removed: {ended.messages.strip()[-300:]}")

    async def kill(self) -> None:
        self._is_running = False
        await self.ask("kill", self._place.name)

    async def signal(self, number: int) -> None:
        await self.ask("exec", self._place.name, "sh", "-c", f"kill -{number} -1")

    async def ask(self, *arguments: str, deadline_s: float = _CALL_S) -> Ended:
        """Run the engine's program. Raises `SandboxFailed`."""
        # podman's monitor writes a file into its working directory when memory runs out.
        cwd = self._place.folder.parent
        return await call(self._spec.kind, *arguments, deadline_s=deadline_s, env=os.environ, cwd=cwd)

    async def _start(self) -> None:
        if not self._is_running:
            # An engine that is killed meanwhile forgets the container, which runs on.
            await to_the_end(self._require("start", self._place.name))
            self._is_running = True

    async def _require(self, *arguments: str, deadline_s: float = _CALL_S) -> None:
        ended = await self.ask(*arguments, deadline_s=deadline_s)
        if ended.code:
            said = ended.messages.strip()[-500:]
            raise SandboxFailed(f"`{self._spec.kind} {arguments[0]}` failed with exit code {ended.code}: {said}")

    async def _has_hit_memory_limit(self) -> bool:
        if self._spec.memory_mb is None:
            return False
        # Its state says so only once the container has ended; the command that was killed was not its first process.
        counts = await self.ask("exec", self._place.name, "sh", "-c", f"cat {' '.join(_OOM_FILES)} 2>/dev/null")
        words = counts.output.split()
        if "oom_kill" in words:
            return words[words.index("oom_kill") + 1] != "0"
        state = await self.ask("inspect", "--format", "{{.State.OOMKilled}}", self._place.name)
        return state.output.strip() == "true"

    def _options(self) -> Iterator[str]:
        spec, place = self._spec, self._place
        yield from ("--name", place.name, "--label", f"{BOX_LABEL}={place.name}")
        yield from ("--label", f"{ROLLOUT_LABEL}={place.workdir}", "--init", "--entrypoint", "")
        yield from ("--stop-signal", "KILL")  # the keeper ignores the usual one, and removal would wait for it
        yield from ("--cap-drop", "all", "--security-opt", "no-new-privileges")
        if not spec.network:
            yield from ("--network", "none")
        if spec.user is not None:
            yield from ("--user", spec.user)
        if spec.cpus is not None:
            yield from ("--cpus", f"{spec.cpus:g}")
        if spec.memory_mb is not None:
            yield from ("--memory", f"{spec.memory_mb}m", "--memory-swap", f"{spec.memory_mb}m")
        if spec.pids is not None:
            yield from ("--pids-limit", str(spec.pids))
        yield from ("--workdir", str(place.workdir))
        ours = (*(Mount(path, str(path)) for path in place.programs), Mount(place.folder, str(place.folder)))
        for mount in (*ours, *spec.shown, Mount(place.workdir, str(place.workdir), is_writable=True)):
            yield from ("--volume", f"{mount.source}:{mount.target}:{'rw' if mount.is_writable else 'ro'}")


class ContainerCommand:
    """`RunningCommand` behind the engine's client, which passes output on but no signals."""

    def __init__(self, box: ContainerSandbox, client: RunningCommand) -> None:
        self._box = box
        self._client = client
        self._signals = asyncio.Lock()  # the order in which they were sent
        self._sending: set[asyncio.Task[None]] = set()

    async def wait(self) -> int:
        return await self._client.wait()

    def signal(self, number: int) -> bool:
        """End the client, whose container `stop` ends. Other signals reach every process of the container."""
        if number in (SIGKILL, SIGTERM):
            return self._client.signal(number)
        sending = asyncio.create_task(self._send(number), name="signal a container")
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        return self._client.signal(0)

    async def stop(self, *, grace_s: float) -> list[int]:
        try:
            await self._send(SIGTERM)
            await within(grace_s, self._client.wait())
        finally:
            left = await to_the_end(self._end())
        return left

    async def _send(self, number: int) -> None:
        async with self._signals:
            with suppress(SandboxFailed):
                await self._box.signal(number)

    async def _end(self) -> list[int]:
        await asyncio.gather(*self._sending)
        with suppress(SandboxFailed):  # `Sandbox.stop` removes the container, and reports a failure
            await self._box.kill()
        return await self._client.stop(grace_s=0.5)


def _write_variables(path: Path, env: Mapping[str, str]) -> None:
    lines = (f"export {name}={shlex.quote(value)}\n" for name, value in env.items() if name.isidentifier())
    path.unlink(missing_ok=True)
    path.write_text("".join(lines), encoding="utf-8", errors="surrogateescape")
    path.chmod(0o444)


def _give(workdir: Path, uid: int, gid: int) -> None:
    folders = [workdir]  # no recursion: an agent may nest a thousand folders
    while folders:
        folder = folders.pop()
        try:
            os.chown(folder, uid, gid, follow_symlinks=False)
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry))
                    else:
                        os.chown(entry, uid, gid, follow_symlinks=False)
        except OSError as error:
            if error.errno != ENAMETOOLONG:  # of an agent, which owns it
                raise
