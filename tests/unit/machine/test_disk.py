"""Files that take the place of others."""

from pathlib import Path

import pytest

from harness.machine.disk import replacing


def test_two_who_write_one_file_leave_one_of_theirs(tmp_path: Path):
    """Whole, and that of who ended last; neither writes into the file of the other."""
    path = tmp_path / "page.html"
    with replacing(path) as first:
        first.write("first, ")
        with replacing(path) as second:
            second.write("second")
        assert path.read_text() == "second"
        first.write("whole")

    assert path.read_text() == "first, whole"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("end", [KeyboardInterrupt, RuntimeError])
def test_a_write_that_breaks_off_leaves_what_was_there(tmp_path: Path, end: type[BaseException]):
    path = tmp_path / "page.html"
    path.write_text("before")

    def write() -> None:
        with replacing(path) as file:
            file.write("half")
            raise end

    with pytest.raises(end):
        write()

    assert path.read_text() == "before"
    assert [*tmp_path.iterdir()] == [path]
