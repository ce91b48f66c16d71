"""A session that is looked into while it continues: what is read of it, and what a browser is told."""

from typing import Any

import pytest

from harness.samples.delivery import Selection
from harness.sessions.record import session_record
from harness.types import Json
from harness.viewer.live.live_look import SeenRecord
from harness.viewer.page.page_data import TokenTable
from harness.viewer.run_view import DAMAGE
from tests.builders import new_session, take_turn, toy_tokenizer, user

TIMELESS: Json = {"turn": 0, "parent": None, "status": "completed", "seconds": "x"}
LEFT, RIGHT = [user("Left?")], [user("Right?")]


def take(seen: SeenRecord, record: Json, since: int, version: int, table: TokenTable) -> bool:
    return seen.take(record, since, toy_tokenizer(), table, version)


def told(seen: SeenRecord, version: int) -> Any:
    said = seen.since(version)
    assert said is not None
    return said


def test_a_later_turn_can_put_an_earlier_one_out_of_the_samples():
    """It is told again, without the tokens that are known; one that nothing has happened to is not."""
    session, table = new_session(selection=Selection.ONE), TokenTable()
    first = take_turn(session, LEFT, "One.")
    seen = SeenRecord(session.session_id)
    assert take(seen, session_record(session), seen.unread_since, 1, table)
    before = told(seen, 0)
    take_turn(session, [*LEFT, first.reply, user("More.")], "Two.")
    since = seen.unread_since
    assert take(seen, session_record(session, since=since), since, 2, table)
    longer = told(seen, 1)
    take_turn(session, [*LEFT, first.reply, user("Other.")], "Three, and more.")
    assert take(seen, session_record(session, since=2), 2, 3, table)
    forked = told(seen, 2)

    assert since == 1
    assert [turn["index"] for turn in longer["turns"]] == [1]
    assert [(turn["index"], turn["fate"]) for turn in forked["turns"]] == [(1, "other_sample"), (2, "trained")]
    assert [("tokens" in turn, "logprobs" in turn) for turn in forked["turns"]] == [(False,) * 2, (True,) * 2]
    assert forked["turns"][0]["messages"] == longer["turns"][0]["messages"]
    assert told(seen, 0)["turns"][0]["tokens"] == before["turns"][0]["tokens"]
    assert forked["order"] == [(0, 0), (1, 1), (2, 1)]
    assert seen.since(3) is None


def test_what_does_not_fit_to_what_was_read_is_not_taken():
    """Nothing changes then: all of it has to be read."""
    session, table = new_session(), TokenTable()
    take_turn(session, LEFT, "One.")
    seen = SeenRecord(session.session_id)
    record = session_record(session, since=1)

    assert not take(seen, record, 1, 1, table)
    assert take(seen, session_record(session), 0, 2, table)
    record["turns"][0]["output_length"] += 1
    assert not take(seen, record, 1, 3, table)
    assert seen.since(2) is None


def test_a_turn_that_is_in_flight_is_read_from_again():
    session, table = new_session(), TokenTable()
    take_turn(session, LEFT, "One.")
    take_turn(session, RIGHT, "Two.")
    record = session_record(session)
    seen = SeenRecord(session.session_id)
    assert take(seen, {**record, "turns": record["turns"][1:], "turns_in_flight": 1}, 0, 1, table)
    assert seen.unread_since == 0
    assert take(seen, record, 0, 2, table)

    assert [turn["index"] for turn in told(seen, 1)["turns"]] == [0]
    assert seen.unread_since == 2


def test_a_turn_that_was_cut_short_is_not_read_again_until_it_goes_on():
    """A record from behind it on does not fit then; nor does one where it was asked for once more, in vain."""
    session, table = new_session(), TokenTable()
    take_turn(session, LEFT, "One.")
    take_turn(session, RIGHT, "Two.")
    whole = session_record(session)
    whole["turns"][0]["status"] = "aborted"
    seen = SeenRecord(session.session_id)
    assert take(seen, whole, 0, 1, table)
    later = session_record(session, since=2)
    later["turns"][0]["status"] = "aborted"

    assert seen.unread_since == 2
    assert take(seen, later, 2, 2, table)
    for change in ({"status": "completed"}, {"seconds": 9.0}):
        changed = {**later, "turns": [{**later["turns"][0], **change}, *later["turns"][1:]]}
        assert not take(seen, changed, 2, 3, table)


@pytest.mark.parametrize("damage", [{"ledger": {"trained": "x"}}, {"turns": [TIMELESS]}])
def test_a_record_that_cannot_be_shown_is_not_taken(damage: Json):
    """What it raises comes when it is taken, and not when a browser is told; what was read before stays."""
    session, table = new_session(), TokenTable()
    take_turn(session, LEFT, "One.")
    seen = SeenRecord(session.session_id)
    take(seen, session_record(session), 0, 1, table)
    before = told(seen, 0)
    take_turn(session, RIGHT, "Two.")
    with pytest.raises(DAMAGE):
        take(seen, session_record(session) | damage, 0, 2, table)

    assert told(seen, 0) == before
    assert seen.unread_since == 1


def test_a_reason_why_it_cannot_be_read_is_told_once():
    session, table = new_session(), TokenTable()
    take_turn(session, LEFT, "One.")
    seen = SeenRecord(session.session_id)
    take(seen, session_record(session), 0, 1, table)
    seen.miss("its turns: it is damaged", 2)
    seen.miss("its turns: it is damaged", 3)

    assert seen.since(2) is None
    assert (told(seen, 1)["missing"], told(seen, 1)["turns"]) == ("its turns: it is damaged", [])
    assert len(told(seen, 0)["turns"]) == 1
