"""Lines that survive whatever kills their writer."""

from pathlib import Path

from harness.suite.training.report import StepFile


def test_a_line_is_written_behind_the_last_whole_one(tmp_path: Path):
    """What a killed process or a full disk had left of a line is gone."""
    path = tmp_path / "weights.jsonl"
    file = StepFile(path)
    file.append(b'{"version": 1}')
    with path.open("ab") as torn:
        torn.write(b'{"vers')
    file.append(b'{"version": 2}')
    assert file.read() == [b'{"version": 1}', b'{"version": 2}']
    path.write_bytes(b'{"vers')
    file.append(b'{"version": 1}')
    assert file.read() == [b'{"version": 1}']
