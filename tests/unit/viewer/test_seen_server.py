"""A server as it has been seen: each browser is told what it does not have, whatever the others were told."""

from harness.client.session_server import HoldTimes, SessionList, SessionSummary, TurnTime, TurnTimes
from harness.sessions.gate import HoldKind
from harness.sessions.hold_times import HoldTime
from harness.types import Json
from harness.viewer.live.seen_server import MOST_GONE, SeenServer

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


def test_times_are_asked_of_sessions_whose_turns_have_changed():
    """From the first turn on that may be another; tokens alone change none, and a turn that was cut short may."""
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

    assert (first, growing, ended, again) == ({"a": 0}, {}, {"a": 1}, {"a": 1})
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


def test_a_band_that_its_server_forgot_has_ended():
    """A server without a file remembers nothing of before its start."""
    server = SeenServer()
    server.take_holds(HoldTimes(50.0, [HoldTime("trainer", HoldKind.PAUSE, True, 40.0, None)]))
    before = server.version
    server.take_holds(HoldTimes(60.0, [HoldTime("trainer", HoldKind.PAUSE, True, 40.0, None)]))
    same = server.since(before)["bands"]
    server.take_holds(HoldTimes(70.0, []))

    assert same == []
    [band] = server.since(before)["bands"]
    assert (band["kind"], band["begin"], band["end"], band["words"]) == ("update", 40.0, 70.0, "by trainer")


def test_a_version_of_another_start_is_none():
    """Whoever has more than there is has it of somebody else."""
    server = SeenServer()
    see(server, summary("a"))

    assert server.since(99)["anew"] is True
    assert ids(server.since(99)) == ["a"]
