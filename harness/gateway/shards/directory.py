"""The directory of a front and its shards.

    DIR/front.db        the holds of the gate; its claim covers the directory
    DIR/shard-0.db ...  the sessions of a shard
    DIR/shards.json     `ShardRecord`

The record precedes the first shard store, so stores without a record mean that it was lost. Each write replaces the
file atomically and durably.
"""

import socket
from contextlib import ExitStack
from pathlib import Path

import msgspec

from harness.decoding import read_json
from harness.errors import CannotListen, ScenarioError, StoreError
from harness.machine.disk import sync
from harness.machine.process_group import ProcessName, end_group

_RECORD = "shards.json"
_GRACE_S = 2.0
_LAST_PORT = 65_535


class ShardRecord(msgspec.Struct):
    ports: list[int]
    """Port of each shard. Base URLs of sessions contain it."""
    drains: int = 0
    drained: list[int] = []
    """Last drain that each shard completed."""
    processes: list[ProcessName | None] = []
    """First process of each shard, which leads its group."""
    has_served: bool = True
    """True once every shard has answered. Sessions may then exist, so ports and shard count are fixed."""


class ShardDirectory:
    """The files in `folder` for `shards` shards. Methods raise `StoreError`.

    Order of calls: `prepare`, claim of the front's store, `open`, then `begin` before the first shard starts.
    """

    def __init__(self, folder: Path, shards: int) -> None:
        self.folder = folder
        self._shards = shards
        self._left: list[ProcessName | None] = []
        self.record = ShardRecord([])

    @property
    def front_store(self) -> Path:
        return self.folder / "front.db"

    def shard_store(self, number: int) -> Path:
        return self.folder / f"shard-{number}.db"

    def prepare(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"--store {self.folder}: expected a directory for the shards: {error.strerror}") from error

    def open(self, host: str, front_port: int) -> None:
        """Read the record, or create one with the ports after the front's.

        Raises `ScenarioError` for another number of shards, `CannotListen` if too few ports are left.
        """
        path = self.folder / _RECORD
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            self._require_no_stores()
            self.record = self._choose(host, front_port)
            return
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from error
        try:
            record = read_json(content, ShardRecord)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError(f"{path}: expected the record of a front: {error}; restore it, or name another") from error
        self._left = record.processes
        if not record.has_served:
            self.record = self._choose(host, front_port)
            return
        made_for = len(record.ports)
        if made_for != self._shards:
            raise ScenarioError(
                f"--store {self.folder}: made for {made_for} shards, not for {self._shards}: sessions are where their"
                f" ids say. Give --shards {made_for}, or another directory"
            )
        self.record = self._completed(record)

    def begin(self) -> None:
        """Write the record before any shard store exists."""
        self._write()

    def note_served(self) -> None:
        self.record.has_served = True
        self._write()

    def end_left_processes(self) -> None:
        """End shards that a killed front left. Blocks for a few seconds."""
        for process in self._left:
            if process is not None and process.is_in(process.pid):
                end_group(process.pid, grace_s=_GRACE_S)

    def note_process(self, number: int, process: ProcessName | None) -> None:
        self.record.processes[number] = process
        self._write()

    def note_drain(self) -> None:
        """Record a new drain, which every shard owes."""
        self.record.drains += 1
        self._write()

    def note_drained(self, number: int, drain: int) -> None:
        self.record.drained[number] = max(drain, self.record.drained[number])
        self._write()

    def owes(self, number: int) -> int:
        """Return the drain that the shard owes, or 0."""
        return self.record.drains if self.record.drained[number] < self.record.drains else 0

    def _require_no_stores(self) -> None:
        stores = sum(1 for _ in self.folder.glob("shard-*.db"))
        if stores:
            raise StoreError(
                f"{self.folder}: expected {_RECORD} next to the stores of {stores} shards: it has the ports that are in"
                " the addresses of sessions. Restore it, or write one with the port of each shard"
                ' ({"ports": [8001, 8002]}), or name another --store'
            )

    def _choose(self, host: str, front_port: int) -> ShardRecord:
        return self._completed(ShardRecord(_choose_ports(host, front_port, self._shards), has_served=False))

    def _completed(self, record: ShardRecord) -> ShardRecord:
        missing = self._shards - len(record.drained)
        record.drained += [record.drains] * missing
        record.processes += [None] * (self._shards - len(record.processes))
        return record

    def _write(self) -> None:
        path, part = self.folder / _RECORD, self.folder / f"{_RECORD}.part"
        try:
            part.write_bytes(msgspec.json.format(msgspec.json.encode(self.record)))
            sync(part)
            part.replace(path)
            sync(self.folder)
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from error


def _choose_ports(host: str, front_port: int, shards: int) -> list[int]:
    if front_port and front_port + shards > _LAST_PORT:
        raise CannotListen(f"{shards} shards take the ports behind {front_port}: choose a smaller --port")
    if front_port:
        return [front_port + 1 + number for number in range(shards)]
    with ExitStack() as stack:  # all at once, so that no port is chosen twice
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listeners = [stack.enter_context(socket.create_server((host, 0), family=family)) for _ in range(shards)]
        return [listener.getsockname()[1] for listener in listeners]
