"""A box is left behind exactly if its manager's process has ended, here."""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from harness.rollouts.sandboxes.left_behind import is_left, new_name, remove_left


def test_a_box_of_a_process_that_runs_is_not_left():
    """Ours, for one."""
    assert not is_left(new_name())


@pytest.mark.parametrize(
    ("pattern", "other", "expected"),
    [
        (r"-(\d+)-(\d+)-(\w+)$", r"-\1-1-\3", True),  # the id was given to another process
        (r"box-\w{8}", "box-00000000", False),  # of another boot, machine or container
        (r"^harness", "somebody", False),
        (r"\w$", "", False),
    ],
)
def test_other_names(pattern, other, expected):
    """Neither a reused process id nor a name of another make deceives."""
    assert is_left(re.sub(pattern, other, new_name())) is expected


async def test_folders_of_the_dead_are_removed_and_those_of_the_living_stay():
    """The same for a folder that lies beside them."""
    with subprocess.Popen(("true",)) as ended:
        pass
    ours = Path(tempfile.gettempdir()) / new_name()
    dead = ours.with_name(ours.name.replace(f"-{os.getpid()}-", f"-{ended.pid}-"))
    for folder in (ours, dead):
        (folder / "shown").mkdir(parents=True)
    await remove_left(())
    assert not dead.exists()
    assert ours.exists()
    (ours / "shown").rmdir()
    ours.rmdir()
