"""What a front keeps of its shards, read back by the next one."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from harness.errors import CannotListen, ScenarioError, StoreError
from harness.gateway.shards.directory import ShardDirectory
from harness.machine.process_group import ProcessName


def opened(folder: Path, shards: int = 2, port: int = 0) -> ShardDirectory:
    """The directory as a front begins with it."""
    directory = ShardDirectory(folder, shards)
    directory.prepare()
    directory.open("127.0.0.1", port)
    return directory


def test_the_next_front_finds_ports_and_drains(tmp_path: Path):
    """Ports stay whatever its own is; a shard that has not answered a drain owes it."""
    first = opened(tmp_path, port=8000)
    first.note_served()
    first.note_drain()
    first.note_drained(1, 1)
    second = opened(tmp_path, port=9000)

    assert first.record.ports == second.record.ports == [8001, 8002]
    assert [second.owes(number) for number in range(2)] == [1, 0]


def test_a_drain_that_was_overtaken_is_carried_out_with_the_next(tmp_path: Path):
    """The last one is owed; an older answer that comes late does not take it back."""
    directory = opened(tmp_path)
    directory.note_drain()
    directory.note_drain()
    directory.note_drained(0, 2)
    directory.note_drained(0, 1)
    directory.note_drained(1, 1)

    assert [directory.owes(number) for number in range(2)] == [0, 2]


def test_a_start_that_failed_binds_nobody(tmp_path: Path):
    """Another number of shards may begin, though there are stores of the first ones."""
    first = opened(tmp_path, shards=2, port=8000)
    first.begin()
    first.note_drain()
    first.shard_store(0).touch()
    second = opened(tmp_path, shards=3, port=9000)

    assert second.record.ports == [9001, 9002, 9003]
    assert [second.owes(number) for number in range(3)] == [0] * 3


def test_a_lost_record_is_not_replaced(tmp_path: Path):
    """Sessions are in the stores, under ports that nobody knows; one that is written by hand will do."""
    first = opened(tmp_path, port=8000)
    first.note_served()
    first.shard_store(1).touch()
    (tmp_path / "shards.json").unlink()
    with pytest.raises(StoreError, match=r"expected shards\.json next to the stores of 1 shards.*Restore it"):
        opened(tmp_path, port=8000)
    (tmp_path / "shards.json").write_text('{"ports": [8001, 8002]}')

    assert opened(tmp_path, port=9000).record == first.record


def test_processes_of_a_start_that_failed_are_ended_by_the_next(tmp_path: Path):
    """A front that was killed before all of them answered, and its watchdog with it."""
    first = opened(tmp_path, shards=3)
    with subprocess.Popen(["/bin/sleep", "600"], start_new_session=True) as process:
        first.note_process(2, ProcessName.of(process.pid))
        opened(tmp_path, shards=2).end_left_processes()
        assert process.wait(10) == -signal.SIGTERM


def test_another_number_of_shards_is_refused(tmp_path: Path):
    opened(tmp_path, shards=2).note_served()
    with pytest.raises(ScenarioError, match=r"made for 2 shards, not for 3.*--shards 2"):
        opened(tmp_path, shards=3)


@pytest.mark.parametrize("content", [b"", b"{", b'{"ports": "x"}', b"\xff", b"[]"])
def test_a_record_that_cannot_be_read_is_said(tmp_path: Path, content: bytes):
    (tmp_path / "shards.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"shards\.json"):
        opened(tmp_path)


def test_a_folder_that_cannot_be_one_is_said(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="expected a directory"):
        opened(tmp_path / "file" / "shards")


def test_ports_that_do_not_exist_are_refused(tmp_path: Path):
    """The last one is 65535."""
    with pytest.raises(CannotListen, match="smaller --port"):
        opened(tmp_path, shards=3, port=65533)


def test_processes_of_others_are_left_alone(tmp_path: Path):
    """A number that came back as somebody else's: this process leads no shard."""
    directory = opened(tmp_path)
    name = ProcessName.of(os.getpid())
    directory.note_process(0, ProcessName(name.pid, name.started + 1, name.boot))
    opened(tmp_path).end_left_processes()
