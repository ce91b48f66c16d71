"""Files of a box of bwrap, which are the workdir's and the mounts'."""

from pathlib import Path

import pytest

from harness.errors import SandboxFailed
from harness.rollouts.sandboxes.bwrap import BwrapSandbox
from harness.rollouts.sandboxes.sandbox import Place
from harness.rollouts.sandboxes.spec import SandboxSpec


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
    secret = tmp_path / "secret"
    secret.write_text("x")
    link = tmp_path / "work" / "link"
    link.symlink_to(secret)
    up = tmp_path / "work" / ".." / "secret"
    for path in (secret, link, up, Path("/tmp/x")):
        with pytest.raises(SandboxFailed, match="expected a path in the workdir or a mount"):
            await box.get(path, tmp_path / "out")
        with pytest.raises(SandboxFailed, match="expected a path in the workdir or a mount"):
            await box.put(secret, path)
    with pytest.raises(SandboxFailed, match="cannot be copied"):
        await box.get(tmp_path / "work" / "missing", tmp_path / "out")
