"""Whatever an agent leaves as its result is judged, and never raises."""

import json
import os
from pathlib import Path

import pytest

from harness.rollouts.agents.agent_output import (
    MAX_RESULT_BYTES,
    AgentResult,
    parse_result,
    read_result,
    result_of_value,
)


def test_an_object_is_a_result(tmp_path: Path):
    """A JSON object comes back as it was written."""
    path = tmp_path / "result.json"
    path.write_text('{"guesses": 3, "name": "Zoë"}', encoding="utf-8")

    assert read_result(path) == AgentResult({"guesses": 3, "name": "Zoë"})


def test_no_file_is_no_result(tmp_path: Path):
    assert read_result(tmp_path / "result.json") == AgentResult()


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (b"", "not JSON"),
        (b"done!", "not JSON"),
        (b'{"a": 1} trailing', "not JSON"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1, 2]", "a JSON list"),
        (b"null", "a JSON NoneType"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "\\ud800"}', "not UTF-8"),
        (b'{"\\udfff": 1}', "not UTF-8"),
        (b" " * (MAX_RESULT_BYTES + 1), "larger than"),
    ],
)
def test_anything_else_is_garbage(data: bytes, detail: str):
    result = parse_result(data)

    assert result.value is None
    assert detail in result.garbage


def test_a_pipe_in_place_of_the_file_does_not_hang(tmp_path: Path):
    path = tmp_path / "result.json"
    os.mkfifo(path)

    assert read_result(path).garbage


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path):
    """An agent cannot make the harness read another file."""
    (tmp_path / "secret.json").write_text("{}")
    path = tmp_path / "result.json"
    path.symlink_to("secret.json")

    assert read_result(path).garbage


def test_a_directory_in_place_of_the_file_is_garbage(tmp_path: Path):
    assert read_result(tmp_path).garbage


def test_a_returned_object_is_a_result():
    """Functions are held to the same rules as programs."""
    assert result_of_value({"reward": 1}) == AgentResult({"reward": 1})
    assert result_of_value(None) == AgentResult()


def _endless() -> dict[str, object]:
    value: dict[str, object] = {}
    value["self"] = value
    return value


@pytest.mark.parametrize("value", ["text", [1], {"a": object()}, {"a": float("nan")}, {(1, 2): 3}, _endless()])
def test_a_returned_value_that_is_no_json_object_is_garbage(value: object):
    assert result_of_value(value).garbage


def test_a_result_keeps_only_json(tmp_path: Path):
    result = result_of_value({1: (2, 3)})

    assert json.dumps(result.value) == '{"1": [2, 3]}'
