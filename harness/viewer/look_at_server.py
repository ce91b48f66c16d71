"""Views of a running server's sessions, which may change or end meanwhile. Old servers report no holds."""

from collections.abc import Callable
from pathlib import Path

from harness.errors import RunError, SessionServerError
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.session_server import GREETING_S, ServerDescription, SessionServerClient, ask_server
from harness.server.store.rows import TokenizerName
from harness.viewer.damaged_run import say_missing
from harness.viewer.look import find_tokenizer
from harness.viewer.run_view import Band, RunView, SessionLine, hold_band
from harness.viewer.session_view import SessionView

_HOLDS_S = 30.0


def look_at_server(address: SessionServerAddress, tokenizer: Path | None = None) -> RunView:
    """Return the server's sessions and hold times. Raises `SessionServerError`, `TokenizerError`."""

    async def look(server: SessionServerClient) -> RunView:
        lines = [SessionLine(each.session_id, turns=each.turns) for each in await server.sessions()]
        missing, bands = list[str](), list[Band]()
        folder = find_tokenizer(tokenizer_of(await server.describe(deadline_s=GREETING_S)), tokenizer, missing)
        with say_missing("its pauses", missing):
            bands += map(hold_band, (await server.hold_times(deadline_s=_HOLDS_S)).holds)
        return RunView(address.url, lines, tokenizer=folder, bands=bands, missing=missing)

    return ask_server(address, look)


def tokenizer_of(described: ServerDescription) -> TokenizerName:
    """Return the tokenizer of a server. Earlier versions name no folder."""
    return TokenizerName(described.tokenizer or None, described.serves.get("tokenizer_digest"))


def look_into_server(address: SessionServerAddress, session_id: str) -> SessionView:
    """Return a session of the server. Raises `SessionServerError`, or `RunError` if it is gone."""
    record = ask_server(address, lambda server: server.record(session_id))
    if record.get("phase") == "unknown":
        raise RunError(f"{address.url} does not have session {session_id} any more")
    return SessionView.of(record)


def look_into_all(address: SessionServerAddress) -> Callable[[str], SessionView]:
    """Return `look_into_server` for many sessions. It does not wait again for a server that is gone."""
    gone: list[SessionServerError] = []

    def look(session_id: str) -> SessionView:
        if gone:
            raise gone[0]
        try:
            return look_into_server(address, session_id)
        except SessionServerError as error:
            if not error.status:
                gone.append(error)
            raise

    return look
