"""Files of a box of bwrap, which are the workdir's and the mounts', and its cgroup."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from harness.errors import SandboxFailed
from harness.rollouts.sandboxes import bwrap
from harness.rollouts.sandboxes.boxed import new_name
from harness.rollouts.sandboxes.bwrap import BwrapSandbox, groups_named
from harness.rollouts.sandboxes.sandbox import Place
from harness.rollouts.sandboxes.spec import SandboxSpec
from tests.sandbox_programs import require_program


@pytest.fixture(name="box")
def _box(tmp_path):
    workdir = tmp_path / "work"
    workdir.mkdir()
    return BwrapSandbox(SandboxSpec(kind="bwrap"), Place("harness-box-0-1-2-3", workdir, tmp_path / "box"))


async def test_files_and_folders_go_in_and_out(box, tmp_path):
    """With what is below them."""
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "file").write_text("x")
    await box.put(tmp_path / "in", tmp_path / "work" / "in")
    await box.get(tmp_path / "work" / "in" / "deep" / "file", tmp_path / "out" / "file")
    assert (tmp_path / "out" / "file").read_text() == "x"


async def test_nothing_else_of_the_machine_is_read_or_written(box, tmp_path):
    """Neither by a path nor by a link that an agent made."""
    secret, work = tmp_path / "secret", tmp_path / "work"
    secret.write_text("x")
    (work / "link").symlink_to(secret)
    (work / "links").symlink_to(tmp_path)
    (work / "circle").symlink_to("circle")
    for path in (secret, work / ".." / "secret", Path("/tmp/x"), work / "links" / "secret"):
        with pytest.raises(SandboxFailed, match="expected a path in the workdir or a mount"):
            await box.get(path, tmp_path / "out")
        with pytest.raises(SandboxFailed, match="expected a path in the workdir or a mount"):
            await box.put(secret, path)
    with pytest.raises(SandboxFailed, match="cannot be copied"):
        await box.put(secret, work / "circle" / "x")
    with pytest.raises(SandboxFailed, match="a link to elsewhere"):
        await box.get(work / "link", tmp_path / "out")
    with pytest.raises(SandboxFailed, match="cannot be copied"):
        await box.get(tmp_path / "work" / "missing", tmp_path / "out")


async def test_what_an_agent_left_is_replaced_not_followed(box, tmp_path):
    """A link to a file or folder, a folder in place of a file."""
    tests, work, keys = tmp_path / "tests", tmp_path / "work", tmp_path / "keys"
    for folder in (tests / "data", keys, work / "tests" / "other.sh"):
        folder.mkdir(parents=True)
    for name in ("test.sh", "other.sh", "data/list"):
        (tests / name).write_text("ours")
    (keys / "authorized").write_text("theirs")
    (work / "tests" / "test.sh").symlink_to(keys / "authorized")
    (work / "tests" / "data").symlink_to(keys)
    (work / "again").symlink_to(keys)
    for target in (work / "tests", work / "again"):
        await box.put(tests, target)
        assert {name: (target / name).read_text() for name in ("test.sh", "other.sh", "data/list")} == {
            "test.sh": "ours", "other.sh": "ours", "data/list": "ours",
        }  # fmt: skip
    assert [(path.name, path.read_text()) for path in keys.iterdir()] == [("authorized", "theirs")]


async def test_a_mount_is_found_by_its_target(tmp_path):
    """The innermost, and only with `rw` is it written."""
    for name in ("real/work", "data/x", "data/y"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    workdir, source = tmp_path / "link" / "work", tmp_path / "file"
    source.write_text("x")
    mounts = (f"{tmp_path}/data/x:/logs/verifier:rw", f"{tmp_path}/data/y:/logs", f"{tmp_path}/data:{workdir}/data:rw")
    spec = SandboxSpec(kind="bwrap", mounts=mounts)
    box = BwrapSandbox(spec, Place("harness-box-0-1-2-3", workdir, tmp_path / "box"))
    for path, found in {
        "/logs/verifier/f": tmp_path / "data" / "x" / "f",
        f"{workdir}/data/y/f": tmp_path / "data" / "y" / "f",
        f"{workdir}/f": tmp_path / "real" / "work" / "f",
    }.items():
        await box.put(source, Path(path))
        assert found.read_text() == "x"
        await box.get(Path(path), tmp_path / "out")
    await box.get(Path("/logs/f"), tmp_path / "out")
    with pytest.raises(SandboxFailed, match="a mount with `rw`"):
        await box.put(source, Path("/logs/f"))


async def test_a_start_that_is_cancelled_leaves_no_cgroup(tmp_path):
    """An abort may come while its folders are being made."""
    require_program("bwrap")
    name = new_name()
    box = BwrapSandbox(SandboxSpec(kind="bwrap", memory_mb=64, pids=64), Place(name, tmp_path, tmp_path))
    starting = asyncio.create_task(box.start())
    while not groups_named(name):
        assert not starting.done()
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await box.stop()
    assert groups_named(name) == []


def test_a_group_that_goes_away_meanwhile_breaks_no_search(monkeypatch):
    """Of a process that has ended and that its parent has not awaited, the kernel lists some folders and reads none."""
    with subprocess.Popen(("true",)) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(OSError, match="Invalid argument"):
            [*Path(f"/proc/{ended.pid}/net").iterdir()]
        monkeypatch.setattr(bwrap, "ROOT", Path(f"/proc/{ended.pid}"))
        assert groups_named("harness-box-") == []
