"""Working directories of agents go when nobody is at work in them any more."""

from pathlib import Path

from harness.suite.training.scenario_tasks import Workdirs
from tests.unit.collector.packed_steps import index_of


def test_the_directory_of_a_group_stays_for_as_long_as_it_is_carried(tmp_path: Path):
    """However many steps ago it was begun; it goes when no step has it any more."""
    workdirs = Workdirs(tmp_path)
    carried, others = index_of(0, 11, 1), [index_of(0, 1), index_of(0, 12), index_of(1, 1), index_of(2, 0)]
    for index in (carried, *others):
        workdirs.of(index).mkdir(parents=True)
        (workdirs.of(index) / "work.txt").write_text("half done")

    def left() -> set[Path]:
        return {path.parent for path in tmp_path.rglob("work.txt")}

    workdirs.forget(1, [carried.group])
    assert left() == {workdirs.of(carried), workdirs.of(others[2]), workdirs.of(others[3])}
    workdirs.forget(2, [carried.group])
    assert left() == {workdirs.of(carried), workdirs.of(others[3])}
    workdirs.forget(3, [])
    assert list(tmp_path.iterdir()) == []
