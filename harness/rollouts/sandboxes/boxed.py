"""One rollout's box, joined with its session by the relay if the box has a network of its own.

Boxes that a killed manager left are removed: the name of a box identifies its manager's process, boot and process
namespace. Those of managers that cannot be seen from here (another machine on one daemon, a container) stay.
"""

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from harness.errors import SandboxFailed, ScenarioError
from harness.machine.deadlines import to_the_end
from harness.machine.log import get_logger
from harness.machine.process_group import ProcessName
from harness.rollouts.client.session_server import SessionHandle
from harness.rollouts.relay.outside import client_program, open_relay, seen_from_inside
from harness.rollouts.sandboxes.bwrap import BwrapSandbox, groups_named
from harness.rollouts.sandboxes.container import BOX_LABEL, ContainerSandbox
from harness.rollouts.sandboxes.sandbox import BWRAP, CONTAINERS, Place, RunningCommand, Sandbox, StartOnHost, call
from harness.rollouts.sandboxes.spec import SandboxSpec

SANDBOX_NOT_REMOVED = "sandbox_not_removed"

_PORT = 18080  # of the box's own loopback
_SOCKET = "relay.sock"
_CLIENT = "relay.pyz"
_RUN_PYTHON = 'python=$(command -v python3) || python=$0; exec "$python" "$@"'

SandboxFactory = Callable[[SandboxSpec, Place], Sandbox]
"""Maker of a box that is not started."""

_KINDS: dict[str, SandboxFactory] = {BWRAP: BwrapSandbox, **dict.fromkeys(CONTAINERS, ContainerSandbox)}

PREFIX = "harness-box-"
_NAME = re.compile(rf"{PREFIX}([0-9a-f]{{8}})-(\d+)-(\d+)-[0-9a-f]{{12}}")
_SHORT = Path("/tmp")  # noqa: S108  # a box's folder has a name of its own
_LONGEST_BYTES = 30  # of 107 that Linux lets a socket's path have
_CALL_S = 30.0
_REMOVE_S = 120.0

_log = get_logger(__name__)


@dataclass(slots=True)
class LeftBehind:
    """Removed and irremovable boxes."""

    containers: list[str] = field(default_factory=list)
    cgroups: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def new_name() -> str:
    """Return the unique name of a box of this process."""
    ours = ProcessName.of(os.getpid())
    return f"{PREFIX}{_system(ours.boot)}-{ours.pid}-{ours.started}-{uuid4().hex[:12]}"


def folder_of(name: str) -> Path:
    """Return the folder of box `name`, short enough for the socket in it."""
    ours = Path(tempfile.gettempdir())
    return (ours if len(os.fsencode(ours)) <= _LONGEST_BYTES else _SHORT) / name


def is_left(name: str) -> bool:
    """Return whether the manager of box `name` has ended, here."""
    parts = _NAME.fullmatch(name)
    boot = ProcessName.of(os.getpid()).boot
    if parts is None or parts[1] != _system(boot):
        return False
    return not ProcessName(int(parts[2]), int(parts[3]), boot).is_alive()


async def remove_left(kinds: Collection[str] = CONTAINERS) -> LeftBehind:
    """Remove boxes left behind; of containers, only `kinds`."""
    found = LeftBehind()
    for engine in CONTAINERS:
        if engine in kinds and shutil.which(engine) is not None:
            await _remove_containers(engine, found)
    await asyncio.to_thread(_remove_local, found)
    return found


async def _remove_containers(engine: str, found: LeftBehind) -> None:
    listing = ("ps", "--all", "--filter", f"label={BOX_LABEL}", "--format", "{{.Names}}")
    try:
        listed = await call(engine, *listing, deadline_s=_CALL_S, env=os.environ)
        # An engine that does not answer (a client of docker without its daemon) runs no box of this machine.
        left = [] if listed.code else [name for name in listed.output.split() if is_left(name)]
        if left:
            removed = await call(engine, "rm", "--force", "--volumes", *left, deadline_s=_REMOVE_S, env=os.environ)
            if removed.code:
                found.failures.append(f"{engine}: {removed.messages.strip()[-300:]}")
                return
        found.containers += left
    except SandboxFailed as error:
        found.failures.append(error.message)


def _remove_local(found: LeftBehind) -> None:
    for group in groups_named(PREFIX):
        if is_left(group.name):
            group.remove()
            is_there = any(folder.exists() for folder in group.folders)
            (found.failures if is_there else found.cgroups).append(group.name)
    parents = {Path(tempfile.gettempdir()), _SHORT}
    for folder in (found for parent in parents for found in parent.glob(f"{PREFIX}*")):
        if is_left(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
            (found.failures if folder.exists() else found.folders).append(str(folder))


def _system(boot: str) -> str:
    return sha256(f"{boot} {Path('/proc/self/ns/pid').readlink()}".encode()).hexdigest()[:8]


def factory_of(spec: SandboxSpec) -> SandboxFactory:
    """Return the factory of a kind, or of a plug-in `MODULE:FACTORY`. Raises `ScenarioError`."""
    if spec.kind in _KINDS:
        return _KINDS[spec.kind]
    module, _, name = spec.kind.partition(":")
    try:
        factory: SandboxFactory = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ScenarioError(f"sandbox: {spec.kind} cannot be loaded: {error}; expected MODULE:FACTORY") from error
    return factory


class Box(NamedTuple):
    sandbox: Sandbox
    session: SessionHandle
    """Session as the agent sees it."""
    entry: tuple[str, ...]
    """Relay's client, before a command."""

    async def exec(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, on_host: StartOnHost
    ) -> RunningCommand:
        return await self.sandbox.exec((*self.entry, *command), env=env, cwd=cwd, on_host=on_host)


@asynccontextmanager
async def open_box(
    spec: SandboxSpec, workdir: Path, programs: Sequence[Path], session: SessionHandle, interpreter: Path
) -> AsyncIterator[Box]:
    """Start a sandbox for the block. Raises `SandboxFailed`, `CannotListen` or `OSError`."""
    async with AsyncExitStack() as stack:
        folder = folder_of(new_name())
        stack.push_async_callback(_remove_folder, folder)
        place = Place(folder.name, workdir, folder / "shown", tuple(programs))
        _make_folder(place.folder)
        sandbox = factory_of(spec)(spec, place)
        stack.push_async_callback(_remove, sandbox, place)
        await sandbox.start()
        if not sandbox.has_own_network:
            yield Box(sandbox, session, ())
            return
        socket, client = place.folder / _SOCKET, place.folder / _CLIENT
        client.write_bytes(client_program())
        await stack.enter_async_context(open_relay(session, socket, mode=0o666))
        arguments = (str(client), "--socket", str(socket), "--port", str(_PORT), "--")
        # The image's Python fits its libraries; this machine's is the one that a box without an image shows.
        either = ("sh", "-c", _RUN_PYTHON, str(interpreter)) if spec.image is not None else (str(interpreter),)
        yield Box(sandbox, seen_from_inside(session, _PORT), (*either, *arguments))


def _make_folder(shown: Path) -> None:
    # Users of this machine cannot enter the outer folder; a user of the box may read the inner one.
    try:
        shown.parent.mkdir(mode=0o700)
        shown.mkdir(mode=0o755)
        shown.chmod(0o755)
    except OSError as error:
        raise SandboxFailed(f"no folder for the sandbox: {error}") from error


async def _remove(sandbox: Sandbox, place: Place) -> None:
    try:
        await to_the_end(sandbox.stop())
    except SandboxFailed as error:
        _log.warning(SANDBOX_NOT_REMOVED, name=place.name, error=error.message)


async def _remove_folder(folder: Path) -> None:
    await to_the_end(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))
