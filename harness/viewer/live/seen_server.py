"""A server as seen so far, and the parts that a browser lacks. Pure.

Every observation makes a *version*; lines, turns and bands know the version of their last change. A browser sends its
version and gets the later changes, so the server keeps no state of browsers. The last `MOST_GONE` sessions that the
server dropped stay as last seen. Browsers forget older ones themselves. A browser that missed the end of one of those
gets everything again.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from typing import NamedTuple

from harness.rollouts.client.session_server import ReportedHolds, SessionList, SessionSummary, TurnTime, TurnTimes
from harness.types import Json
from harness.viewer.live.live_reading import live_line
from harness.viewer.page.page_data import MOST_BANDS, MOST_GONE, line_data
from harness.viewer.run_view import Band, hold_band

_GONE = "gone"

Standing = tuple[object, ...]
"""Facts of a session that change when one of its turns begins or ends."""


class _Timed(NamedTuple):
    time: TurnTime
    version: int


class SeenSession:
    def __init__(self, summary: SessionSummary, place: int) -> None:
        self.summary = summary
        self.rate: float | None = None
        self.is_gone = False
        self.version = 0
        self._place = place
        self._times: dict[int, _Timed] = {}
        self._times_of: Standing = ()
        # Turns before this one are known. The server reports those that continue without being asked.
        self._told = 0

    @property
    def standing(self) -> Standing:
        each = self.summary
        tokens = 0 if each.turns_in_flight else each.tokens
        return each.created_at, each.phase, each.turns, each.turns_in_flight, tokens

    @property
    def unseen_since(self) -> int | None:
        """First turn whose times may have changed, or None."""
        has_turns = self.summary.turns or self.summary.turns_in_flight or self._times
        return self._told if has_turns and self._times_of != self.standing and not self.is_gone else None

    def take_times(self, standing: Standing, times: Sequence[TurnTime], now: float, version: int) -> None:
        """Record turn times from `unseen_since` on, requested when the session was in `standing`."""
        self._times_of = standing
        for each in times:
            if each.index not in self._times or self._times[each.index].time != each:
                self._times[each.index] = _Timed(each, version)
        self._end_others({each.index for each in times}, now, version)
        new = [each for each in times if each.index >= self._told]
        in_flight = (each.index for each in new if each.seconds is None)
        self._told = min(in_flight, default=max((each.index + 1 for each in new), default=self._told))

    def leave(self, now: float, version: int) -> None:
        """Mark the session as dropped by its server."""
        self.is_gone = True
        self._end_others(set(), now, version)

    def _end_others(self, there: Collection[int], now: float, version: int) -> None:
        # The server no longer reports these turns, so they ended in an unknown way.
        for index, (time, _) in self._times.items():
            if time.seconds is None and index not in there:
                ended = TurnTime(index, time.began_at, max(0.0, now - time.began_at), "unknown")
                self._times[index] = _Timed(ended, version)

    def since(self, version: int) -> Json:
        """Return the line, with the times that changed since `version`."""
        line = live_line(self.summary, self.rate)
        if self.is_gone:
            line = replace(line, state=_GONE, detail="no longer on the server: as last seen")
        times = [
            (time.began_at, time.seconds, time.status, time.index)
            for time, seen_in in self._times.values()
            if seen_in > version
        ]
        others = {"created_at": self.summary.created_at, "place": self._place, "is_gone": self.is_gone}
        return {**line_data(line, None, times), **others}


class SeenServer:
    def __init__(self) -> None:
        self.version = 0
        self.now = 0.0
        """The server's last reported clock."""
        self._sessions: OrderedDict[str, SeenSession] = OrderedDict()  # the one that changed last is the last one
        self._gone: dict[str, None] = {}  # in the order in which they left
        self._bands: dict[tuple[str, float], tuple[Band, int]] = {}
        self._facts: Json = {}
        self._facts_version = 0
        self._forgot_in = 0
        self._places = 0

    def session(self, session_id: str) -> SeenSession | None:
        return self._sessions.get(session_id)

    def take_list(self, listed: SessionList, rates: Mapping[str, float] = {}) -> None:
        """Record the sessions and their speeds. Unlisted ones are gone, unless a shard did not answer."""
        self.version += 1
        for summary in sorted(listed.sessions, key=lambda each: each.created_at):
            seen = self._sessions.get(summary.session_id)
            rate = rates.get(summary.session_id) if summary.turns_in_flight else None
            if seen is None or seen.summary.created_at != summary.created_at:  # the id may be used again
                seen = self._sessions[summary.session_id] = SeenSession(summary, self._places)
                self._places += 1
                self._touch(seen)
            elif (seen.summary, seen.rate) != (summary, rate) or seen.is_gone:
                seen.summary, seen.rate, seen.is_gone = summary, rate, False
                self._touch(seen)
            self._gone.pop(summary.session_id, None)
        if not listed.problems:
            there = {each.session_id for each in listed.sessions}
            for session_id in [each for each, seen in self._sessions.items() if not seen.is_gone]:
                if session_id not in there:
                    self._sessions[session_id].leave(self.now, self.version)
                    self._gone[session_id] = None
                    self._touch(self._sessions[session_id])
        self._forget()

    def unseen_times(self, most: int, but: Collection[str] = ()) -> dict[str, int]:
        """Return up to `most` changed sessions outside `but`, each with its first turn that may have changed."""
        unseen: dict[str, int] = {}
        for session_id, seen in reversed(self._sessions.items()):
            if seen.unseen_since is not None and session_id not in but:
                unseen[session_id] = seen.unseen_since
                if len(unseen) == most:
                    break
        return unseen

    def take_times(self, asked: Mapping[str, Standing], told: TurnTimes) -> None:
        """Record turn times of the requested sessions, given their standing at that time.

        A session missing from a complete answer has no times. In an incomplete one its times are unknown.
        """
        self.version, self.now = self.version + 1, told.now
        is_whole = not told.problems and not told.left_off
        for session_id, standing in asked.items():
            if is_whole or session_id in told.times:
                seen = self._sessions[session_id]
                seen.take_times(standing, told.times.get(session_id, ()), told.now, self.version)
                self._touch(seen)

    def take_holds(self, told: ReportedHolds) -> None:
        """Record hold times. Unfinished holds that are no longer reported have ended."""
        self.version, self.now = self.version + 1, told.now
        running = {(each.holder, each.began_at) for each in told.holds}
        for key, (band, _) in list(self._bands.items()):
            if band.end is None and key not in running:
                self._bands[key] = (Band(band.kind, band.begin, told.now, band.words), self.version)
        for each in told.holds:
            key, band = (each.holder, each.began_at), hold_band(each)
            if key not in self._bands or self._bands[key][0] != band:
                self._bands[key] = (band, self.version)
        ended = [key for key, (band, _) in self._bands.items() if band.end is not None]
        for key in ended[: max(0, len(ended) - MOST_BANDS)]:
            del self._bands[key]

    def take_facts(self, facts: Json) -> None:
        if facts != self._facts:
            self.version += 1
            self._facts, self._facts_version = facts, self.version

    def since(self, version: int) -> Json:
        """Return the changes since `version`, or everything with `anew`."""
        anew = not self._forgot_in <= version <= self.version or not version
        version = 0 if anew else version
        changed = takewhile(lambda each: each.version > version, reversed(self._sessions.values()))
        sessions = sorted((each.since(version) for each in changed), key=lambda line: line["place"])
        bands = [band for band, seen_in in self._bands.values() if seen_in > version]
        return {
            "version": self.version,
            "anew": anew,
            "now": self.now,
            "facts": self._facts if self._facts_version > version else None,
            "sessions": sessions,
            "bands": [asdict(band) for band in sorted(bands, key=lambda each: each.begin)],
        }

    def _touch(self, seen: SeenSession) -> None:
        seen.version = self.version
        self._sessions.move_to_end(seen.summary.session_id)

    def _forget(self) -> None:
        # The longest gone go first.
        for session_id in list(self._gone)[: max(0, len(self._gone) - MOST_GONE)]:
            del self._gone[session_id]
            self._forgot_in = max(self._forgot_in, self._sessions.pop(session_id).version)
