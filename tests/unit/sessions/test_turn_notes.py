"""The notes of a turn are typed in the code and free JSON in stores and records."""

import json

import pytest
from msgspec import ValidationError

from harness.types import Json, TurnNotes

NOTED: Json = {
    "cached_tokens": 0,
    "instructions": True,
    "call_forms": {"add": ["custom", "add", None]},
    "ignored": {"store": None},
    "normalized": {"messages[2].role": "human"},
    "left_out": ["web_search"],
    "tools": 0,
    "toolset": "00ff",
    "tool_definitions": [{"type": "function", "function": {"name": "add"}}],
    "template_variables": {"deep": {"er": [1]}},
    "model_family_faults": ["none"],
    "dialect": "openai_responses",
    "response_id": "f" * 32,
    "client": {"user_agent": "probe/1", "ids": {}, "process": {"id": "1.2"}},
    "matched_loosely": [{"message": 1, "field": "content", "recorded": "a", "sent": "b"}],
    "ambiguous": [0, 2],
    "noise": "x",
    "held_before_s": 0.25,
    "diverged": {"message": 0, "field": "tools", "recorded": "", "sent": "b"},
    "script_step": 0,
    "attempts": 2,
    "held_s": 0.5,
    "malformed_tool_call": True,
    "matched_stop": "\n",
    "error": {"code": "engine_down", "cause": "engine", "message": "gone"},
    "inherited": "masked",
    "asked_again": True,
    "missing_rows": {"lost": 3},
    "rows_until": 2,
    "row_bytes": 40,
}
FOREIGN: Json = {"of_a_later_version": [1, None], "others": {"a": 1}}


def test_stored_notes_are_written_as_they_were_read() -> None:
    """Values, order and absence; a 0 that says something stays."""
    assert list(NOTED) == [name for name in TurnNotes.__struct_fields__ if name != "others"]
    assert json.dumps(TurnNotes.from_json(NOTED).to_json()) == json.dumps(NOTED)
    assert TurnNotes.from_json({}) == TurnNotes()
    assert TurnNotes().to_json() == {}


def test_a_difference_of_an_old_store_is_no_list() -> None:
    """Servers once noted the answer's alone."""
    noted = {"matched_loosely": NOTED["matched_loosely"][0], "side_call": "title"}

    assert TurnNotes.from_json(noted).to_json() == noted


def test_notes_of_other_versions_survive() -> None:
    """A server of before or after, or a dialect of an operator, has written them."""
    notes = TurnNotes.from_json({"attempts": 3, **FOREIGN})

    assert (notes.attempts, notes.others) == (3, FOREIGN)
    assert notes.to_json() == {"attempts": 3, **FOREIGN}


def test_notes_of_another_type_are_damage() -> None:
    with pytest.raises(ValidationError, match="attempts"):
        TurnNotes.from_json({"attempts": "many"})
