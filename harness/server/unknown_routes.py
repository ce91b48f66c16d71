"""What is asked for and is no route, as an operator wants to hear of it: by pattern, and each pattern once.

An agent that speaks another dialect, or was given a wrong base URL, asks for the same few routes in every session. The
part of a path that names a session is not part of its pattern. Clients choose paths, so only so many patterns are kept
and told apart; what comes after them is one pattern more.
"""

MAX_PATTERNS = 64
OTHER = "other"

_MAX_LENGTH = 100
_SESSIONS = "sessions"


class UnknownRoutes:
    """The patterns of one server."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, method: str, path: str) -> str | None:
        """The pattern of a request for no route when it is the first of its kind; None afterwards."""
        pattern = pattern_of(method, path)
        if pattern not in self._seen and len(self._seen) >= MAX_PATTERNS:
            pattern = OTHER
        if pattern in self._seen:
            return None
        self._seen.add(pattern)
        return pattern


def pattern_of(method: str, path: str) -> str:
    """`POST /sessions/{id}/v1/responses` for any session."""
    first, *rest = path.strip("/").split("/")
    if first == _SESSIONS and rest:
        rest[0] = "{id}"
    pattern = "/".join(("", first, *rest))
    return f"{method[:_MAX_LENGTH]} {pattern[:_MAX_LENGTH]}"
