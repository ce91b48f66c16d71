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
from random import SystemRandom
from typing import TYPE_CHECKING

from harness.errors import LaneError
from harness.lab.lanes.commands import LOOPBACK, own_import_path, server_command, write_overlay
from harness.lab.lanes.environment import Requirements, Say, lanes_directory, own_python, provide_python, require_no_gpu
from harness.lab.lanes.spec import Lane, LaneEngine, LaneSpec, new_folder, read_lanes
from harness.machine.disk import hold_lock
from harness.machine.process_group import ProcessName, end_group, members, reap, spawn_held
from harness.machine.watchdog import Watchdog

if TYPE_CHECKING:
    import httpx

START_S = 600.0
_GRACE_S = 10.0


@asynccontextmanager
async def open_lane(spec: LaneSpec, *, say: Say = lambda _: None, deadline_s: float = START_S) -> AsyncIterator[Lane]:
    """Start a server for `spec`, yield it once it generates, and end it with the block. Raises `LaneError`."""
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


async def start_lane(spec: LaneSpec, *, say: Say = lambda _: None, deadline_s: float = START_S) -> Lane:
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
    if had_processes := lane.owns_group():
        end_group(lane.group, grace_s=_GRACE_S)
    lane.forget()
    return had_processes


async def _install(spec: LaneSpec, say: Say) -> Path:
    if spec.engine is LaneEngine.LOCAL:
        return own_python()
    require_no_gpu(spec.engine)
    return await provide_python(Requirements.of(spec.engine), say)


def _spawn(spec: LaneSpec, python: Path, watchdog: Watchdog | None) -> Lane:
    with hold_lock(_directory() / "lock"):  # no two lanes may share a name and its folder
        # An engine binds its port a minute later. The system gives higher ones to others meanwhile.
        ports = [spec.port] if spec.port else SystemRandom().sample(range(20_000, 32_768), 1000)
        port = next((each for each in ports if not _refusal_of(each)), ports[0])
        _require_unused(name := f"{spec.engine}-{port}", port)
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
            # Saved and watched before the line to the gate starts the server. A gate that closes without it ends it.
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
        raise LaneError(f"{name} is already running: use it, or stop it with `harness engine down {name}`")
    if refusal := _refusal_of(port):
        raise LaneError(f"port {port} cannot be used ({refusal}): choose another, or none")


def _refusal_of(port: int) -> str | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            return error.strerror
    return None


def _directory() -> Path:
    return lanes_directory() / "lanes"


_POLL_S = 0.25
_ANSWER_S = 60.0  # the first token of a server takes seconds
_TAIL_LINES = 20
_PROMPT = (1,)  # an id that every vocabulary has


async def until_it_generates(lane: Lane, *, deadline_s: float) -> None:
    """Return when `lane` has generated a token. Raises `LaneError` if it dies or takes longer than `deadline_s`."""
    # No log line and no health endpoint counts.
    import httpx  # here: a run without lanes starts sooner

    last = "nothing"
    try:
        async with asyncio.timeout(deadline_s), httpx.AsyncClient(base_url=lane.url, trust_env=False) as http:
            while last != "200":
                if not lane.is_running():
                    raise LaneError(_explain_death(lane))
                last = await _ask(http, lane)
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise LaneError(
            f"{lane.name} did not generate a token within {deadline_s:g} s, its last answer was {last};"
            f" the log is {lane.log}, its last lines are:\n{log_tail(lane.log)}"
        ) from None


async def _ask(http: "httpx.AsyncClient", lane: Lane) -> str:
    import httpx

    path = "/generate"
    body: dict[str, object] = {"input_ids": _PROMPT, "sampling_params": {"max_new_tokens": 1}}
    if lane.engine == LaneEngine.VLLM:
        path, body = "/v1/completions", {"model": lane.model, "prompt": _PROMPT, "max_tokens": 1}
    try:
        response = await http.post(path, json=body, timeout=_ANSWER_S)
    except httpx.HTTPError as error:
        return type(error).__name__
    return str(response.status_code)


def log_tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])


_ADVICE = {
    "address already in use": "its port is taken: choose another with --port, or none to get a free one",
    "unrecognized arguments": "the engine does not know an argument after `--`: correct or remove it",
    "enomem": "memory ran out: stop other lanes (`harness engine list`) or take a smaller model",
    "cannot allocate memory": "memory ran out: stop other lanes (`harness engine list`) or take a smaller model",
    "no space left on device": "the disk is full: free some space",
}


def _explain_death(lane: Lane) -> str:
    text = lane.log.read_text(encoding="utf-8", errors="replace").lower()
    known = (advice for symptom, advice in _ADVICE.items() if symptom in text)
    advice = next(known, "if it names no cause, the engine was killed, most likely because memory ran out")
    return (
        f"{lane.name} ended while it started; {advice}; the log is {lane.log}, its last lines are:\n"
        f"{log_tail(lane.log)}"
    )
