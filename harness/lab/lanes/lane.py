"""Start and end of lanes: for the time of a block, or from one command to another.

The watchdog ends a lane of a block with this process, however it dies. A lane of `start_lane` lives until `down`.
Ending one is idempotent and signals only processes that are still the lane's.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from harness.errors import LaneError
from harness.lab.lanes.commands import LOOPBACK, server_command
from harness.lab.lanes.environment import (
    Requirements,
    Say,
    lanes_directory,
    own_python,
    provide_python,
    require_no_gpu,
)
from harness.lab.lanes.overlay import own_import_path, write_overlay
from harness.lab.lanes.readiness import until_it_generates
from harness.lab.lanes.spec import LaneEngine, LaneSpec
from harness.lab.lanes.state import Lane, new_folder, read_lanes
from harness.machine.locks import hold_lock
from harness.machine.process_group import end_group, reap
from harness.machine.process_name import ProcessName, members, spawn_held
from harness.machine.watchdog import Watchdog

START_S = 600.0
_GRACE_S = 10.0


def _silent(text: str) -> None:
    del text


@asynccontextmanager
async def open_lane(spec: LaneSpec, *, say: Say = _silent, deadline_s: float = START_S) -> AsyncIterator[Lane]:
    """Start a server for `spec`, yield it when it generates, and end it with the block.

    The first lane of an engine installs it (minutes). Raises `LaneError` if it cannot be installed or started.
    """
    python = await _install(spec, say)
    watchdog = Watchdog()
    try:
        lane = _spawn(spec, python, watchdog)
        try:
            yield await _ready(lane, say, deadline_s)
        finally:
            await _end(lane)
            watchdog.forget(lane.group)
    finally:
        await watchdog.close()


async def start_lane(spec: LaneSpec, *, say: Say = _silent, deadline_s: float = START_S) -> Lane:
    """Start a server for `spec` that outlives this process, and return it when it generates. Raises `LaneError`."""
    python = await _install(spec, say)
    lane = _spawn(spec, python, watchdog=None)
    try:
        return await _ready(lane, say, deadline_s)
    except BaseException:
        await _end(lane)
        raise


def find_lanes() -> list[Lane]:
    """Return the lanes that run and remove the states of the others. Raises `LaneError` for an unreadable one."""
    running = []
    for lane in read_lanes(_directory()):
        if lane.owns_group():
            running.append(lane)
        else:
            lane.forget()
    return running


def down(lane: Lane) -> bool:
    """End all processes of `lane`. Return False if there were none."""
    had_processes = lane.owns_group()
    if had_processes:
        end_group(lane.group, grace_s=_GRACE_S)
    lane.forget()
    return had_processes


async def _install(spec: LaneSpec, say: Say) -> Path:
    if spec.engine is LaneEngine.LOCAL:
        return own_python()
    require_no_gpu(spec.engine)
    return await provide_python(Requirements.of(spec.engine), say)


def _spawn(spec: LaneSpec, python: Path, watchdog: Watchdog | None) -> Lane:
    port = spec.port
    if not port:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port = int(probe.getsockname()[1])
    name = f"{spec.engine}-{port}"
    with hold_lock(_directory() / "lock"):  # no two lanes may share a name and its folder
        _require_unused(name, port)
        return _spawn_as(name, port, spec, python, watchdog)


def _spawn_as(name: str, port: int, spec: LaneSpec, python: Path, watchdog: Watchdog | None) -> Lane:
    folder = new_folder(_directory(), name)
    is_ours = spec.engine is LaneEngine.LOCAL
    import_path = own_import_path(os.environ) if is_ours else write_overlay(spec.engine, folder / "overlay")
    command = server_command(spec, port, python, import_path, os.environ)
    held = spawn_held(command.arguments, command.environment, folder / "server.log")
    try:
        lane = Lane(
            name=name,
            engine=spec.engine,
            url=f"http://{LOOPBACK}:{port}",
            model=spec.model_name,
            model_dir=str(spec.model_dir),
            dtype=spec.dtype,
            group=held.pid,
            processes=(ProcessName.of(held.pid),),
            is_ready=False,
            holder=os.getpid() if watchdog else None,
            folder=str(folder),
        )
        # Saved and watched before the line to the gate starts the server. Closing the gate without it ends the process.
        lane.save()
        if watchdog is not None:
            watchdog.watch(held.pid)
        os.write(held.gate, b"\n")
    finally:
        os.close(held.gate)
    return lane


async def _ready(lane: Lane, say: Say, deadline_s: float) -> Lane:
    say(f"starting {lane.engine} with {lane.model} at {lane.url} (log: {lane.log})")
    await until_it_generates(lane, deadline_s=deadline_s)
    first = lane.processes[0]
    ready = lane.ready((first, *(process for process in members(lane.group) if process != first)))
    ready.save()
    return ready


async def _end(lane: Lane) -> None:

    def end() -> None:
        end_group(lane.group, grace_s=_GRACE_S)  # before `reap`, no other group can have its number
        reap(lane.group)
        lane.forget()

    # Shielded, because a server left behind keeps gigabytes.
    await asyncio.shield(asyncio.to_thread(end))


def _require_unused(name: str, port: int) -> None:
    if any(lane.name == name for lane in find_lanes()):
        raise LaneError(f"{name} runs already: use it, or end it with `harness engine down {name}`")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise LaneError(f"port {port} cannot be used ({error.strerror}): choose another, or none") from None


def _directory() -> Path:
    return lanes_directory() / "lanes"
