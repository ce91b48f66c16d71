"""Removal of containers, cgroups and folders that a killed manager left.

The name of a box identifies its manager's process, boot and process namespace. Boxes of managers that cannot be seen
from here (another machine on one daemon, a container) stay.
"""

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from harness.errors import SandboxFailed
from harness.machine.process_group import ProcessName
from harness.rollouts.sandboxes.bwrap import groups_named
from harness.rollouts.sandboxes.container import BOX_LABEL
from harness.rollouts.sandboxes.sandbox import CONTAINERS, call

PREFIX = "harness-box-"
_NAME = re.compile(rf"{PREFIX}([0-9a-f]{{8}})-(\d+)-(\d+)-[0-9a-f]{{12}}")
_SHORT = Path("/tmp")  # noqa: S108  # a box's folder has a name of its own
_LONGEST_BYTES = 30  # of 107 that Linux lets a socket's path have
_CALL_S = 30.0
_REMOVE_S = 120.0


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
