"""One rollout's box, joined with its session by the relay if the box has a network of its own."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from harness.errors import SandboxFailed, ScenarioError
from harness.machine.deadlines import to_the_end
from harness.machine.log import get_logger
from harness.rollouts.client.session_server import SessionHandle
from harness.rollouts.relay.outside import client_program, open_relay, seen_from_inside
from harness.rollouts.sandboxes.bwrap import BwrapSandbox
from harness.rollouts.sandboxes.container import ContainerSandbox
from harness.rollouts.sandboxes.left_behind import folder_of, new_name
from harness.rollouts.sandboxes.sandbox import BWRAP, CONTAINERS, Place, RunningCommand, Sandbox, StartOnHost
from harness.rollouts.sandboxes.spec import SandboxSpec

SANDBOX_NOT_REMOVED = "sandbox_not_removed"

_PORT = 18080  # of the box's own loopback
_SOCKET = "relay.sock"
_CLIENT = "relay.pyz"
_RUN_PYTHON = 'python=$(command -v python3) || python=$0; exec "$python" "$@"'

SandboxFactory = Callable[[SandboxSpec, Place], Sandbox]
"""Maker of a box that is not started."""

_KINDS: dict[str, SandboxFactory] = {BWRAP: BwrapSandbox, **dict.fromkeys(CONTAINERS, ContainerSandbox)}

_log = get_logger(__name__)


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
