"""A server as it has been seen: each browser is told what it does not have, whatever the others were told."""

from harness.rollouts.client.session_server import ReportedHolds, SessionList, SessionSummary, TurnTime, TurnTimes
from harness.sessions.gate import HoldKind
from harness.sessions.hold_times import HoldTime
from harness.types import Json
from harness.viewer.live.seen_server import SeenServer
from harness.viewer.page.page_data import MOST_GONE

DONE = TurnTime(0, 100.0, 2.0, "completed")
GROWING = TurnTime(1, 103.0, None, "in_flight")


def summary(session_id: str, *, turns: int = 0, in_flight: int = 0, tokens: int = 0) -> SessionSummary:
    state = "engine" if in_flight else "tool"
    return SessionSummary(session_id, "open", turns, in_flight, state, tokens, created_at=float(ord(session_id[0])))


def see(server: SeenServer, *summaries: SessionSummary) -> None:
    server.take_list(SessionList(list(summaries)))


def see_times(server: SeenServer, *, now: float = 200.0, **times: list[TurnTime]) -> dict[str, int]:
    """The first turns that are asked for, each answered by what is in `times`."""
    asked = server.unseen_times(100)
    standings = {each: seen.standing for each in asked if (seen := server.session(each))}
    server.take_times(standings, TurnTimes(now, times))
    return asked


def ids(told: Json) -> list[str]:
    return [line["id"] for line in told["sessions"]]


def test_a_browser_is_told_what_has_changed_since_its_version():
    """One that comes late is told everything, and one that has everything nothing; lines keep their places."""
    server = SeenServer()
    see(server, summary("b"), summary("a"))
    first = server.since(0)
    see(server, summary("a"), summary("b"))
    still = server.since(first["version"])
    see(server, summary("a"), summary("b", in_flight=1, tokens=5), summary("c"))
    later = server.since(still["version"])

    assert (first["anew"], ids(first)) == (True, ["a", "b"])
    assert (still["anew"], ids(still)) == (False, [])
    assert (ids(later), later["sessions"][0]["outcome"], later["sessions"][0]["sampled"]) == (["b", "c"], "engine", 5)
    assert ids(server.since(0)) == ["a", "b", "c"]
    assert [line["place"] for line in server.since(0)["sessions"]] == [0, 1, 2]


def test_speeds_are_told_of_sessions_in_flight():
    """The first speed of an idle one is no change: of many sessions that would be all of them."""
    server = SeenServer()
    both = SessionList([summary("a", in_flight=1, tokens=5), summary("b", tokens=5)])
    server.take_list(both)
    has = server.version
    server.take_list(both, {"a": 0.0, "b": 0.0})

    assert [line["why"] for line in server.since(has)["sessions"]] == ["1 in flight, 0 tokens/s"]


def test_times_are_asked_of_sessions_whose_turns_have_changed():
    """From the first turn on that is not known; tokens alone change none, and one that was cut short early is known."""
    server = SeenServer()
    see(server, summary("a", turns=1, in_flight=1), summary("b"))
    first = see_times(server, a=[DONE, GROWING])
    see(server, summary("a", turns=1, in_flight=1, tokens=50), summary("b"))
    growing = see_times(server)
    see(server, summary("a", turns=2, tokens=60), summary("b"))
    before = server.version
    ended = see_times(server, a=[TurnTime(1, 103.0, 4.0, "aborted")])
    see(server, summary("a", turns=3, tokens=70), summary("b"))
    again = see_times(server)

    assert (first, growing, ended, again) == ({"a": 0}, {}, {"a": 1}, {"a": 2})
    [line] = server.since(before)["sessions"]
    assert line["times"] == [(103.0, 4.0, "aborted", 1)]


def test_a_session_that_is_gone_stays_as_it_was_seen():
    """And is marked; a turn that was in flight has ended. Where a shard has not answered, nobody is gone."""
    server = SeenServer()
    see(server, summary("a", turns=1, in_flight=1, tokens=9))
    see_times(server, now=110.0, a=[DONE, GROWING])
    server.take_list(SessionList([], problems=["shard 1 is being started"]))
    unknown = server.since(0)["sessions"][0]["is_gone"]
    before = server.version
    see(server)
    [line] = server.since(before)["sessions"]
    see(server, summary("a", turns=2))

    assert unknown is False
    assert (line["is_gone"], line["outcome"], line["sampled"]) == (True, "gone", 9)
    assert line["times"] == [(103.0, 7.0, "unknown", 1)]
    assert server.since(0)["sessions"][0]["is_gone"] is False


def test_of_those_that_are_gone_the_last_stay():
    """A server that runs for months does not fill memory; a browser that has more of them begins anew."""
    server = SeenServer()
    many = [SessionSummary(f"{number:05}", "open", 0, 0, "tool") for number in range(MOST_GONE + 10)]
    see(server, *many)
    had = server.version
    see(server, summary("a"))

    told = server.since(had)
    assert told["anew"] is True
    assert len(told["sessions"]) == MOST_GONE + 1
    assert server.since(told["version"])["anew"] is False


def test_a_browser_that_has_heard_of_all_that_left_is_told_no_more_than_that():
    """However many have gone before; and one that comes back and leaves again is the last to be let go of."""
    server = SeenServer()
    many = [SessionSummary(f"{number:05}", "open", 0, 0, "tool") for number in range(MOST_GONE + 10)]
    see(server, *many[:-5])
    see(server, *many[-5:])
    has = server.since(0)["version"]
    for left in range(1, 5):
        see(server, *many[-5 + left :])
        told = server.since(has)
        has = told["version"]
        assert (told["anew"], len(told["sessions"])) == (False, 1)
    see(server, many[6])
    see(server)
    assert server.session("00006") is not None
    assert server.session("00005") is None


def test_an_id_that_is_used_again_is_another_session():
    """A server that remembers nothing may give it out anew: its turns are asked for from the first one on."""
    server = SeenServer()
    see(server, summary("a", turns=1))
    see_times(server, a=[DONE])
    has = server.version
    again = summary("a", turns=1)
    see(server, SessionSummary("a", again.phase, 1, 0, again.state, created_at=again.created_at + 1))
    [line] = server.since(has)["sessions"]

    assert (line["times"], line["created_at"]) == ([], again.created_at + 1)
    assert see_times(server) == {"a": 0}


def test_a_session_of_which_a_shard_has_not_told_is_asked_for_again():
    """And so is one that an answer had no room for; those that are in the answer are known."""
    for told in (TurnTimes(5.0, {"a": [DONE]}, problems=["shard 1"]), TurnTimes(5.0, {"a": [DONE]}, left_off=["b"])):
        server = SeenServer()
        see(server, summary("a", turns=1), summary("b", turns=1))
        asked = server.unseen_times(100)
        server.take_times({each: seen.standing for each in asked if (seen := server.session(each))}, told)

        assert server.unseen_times(100) == {"b": 0}
        assert server.unseen_times(100, asked) == {}


def test_a_turn_that_goes_on_again_is_seen_without_asking_for_those_behind_it():
    """While it is in flight and when it has ended."""
    server = SeenServer()
    see(server, summary("a", turns=2))
    see_times(server, a=[TurnTime(0, 100.0, 2.0, "aborted"), TurnTime(1, 103.0, 4.0, "completed")])
    see(server, summary("a", turns=2, in_flight=1))
    going_on = see_times(server, a=[TurnTime(0, 110.0, None, "in_flight")])
    has = server.version
    see(server, summary("a", turns=2))
    ended = see_times(server, a=[TurnTime(0, 100.0, 5.0, "completed")])
    [line] = server.since(has)["sessions"]

    assert going_on == ended == {"a": 2}
    assert line["times"] == [(100.0, 5.0, "completed", 0)]


def test_a_band_that_its_server_forgot_has_ended():
    """A server without a file remembers nothing of before its start."""
    server = SeenServer()
    server.take_holds(ReportedHolds(50.0, [HoldTime("trainer", HoldKind.PAUSE, True, 40.0, None)]))
    before = server.version
    server.take_holds(ReportedHolds(60.0, [HoldTime("trainer", HoldKind.PAUSE, True, 40.0, None)]))
    same = server.since(before)["bands"]
    server.take_holds(ReportedHolds(70.0, []))

    assert same == []
    [band] = server.since(before)["bands"]
    assert (band["kind"], band["begin"], band["end"], band["words"]) == ("update", 40.0, 70.0, "by trainer")


def test_a_version_of_another_start_is_none():
    """Whoever has more than there is has it of somebody else."""
    server = SeenServer()
    see(server, summary("a"))

    assert server.since(99)["anew"] is True
    assert ids(server.since(99)) == ["a"]
