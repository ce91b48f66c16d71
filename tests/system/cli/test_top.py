"""`harness ctl top`: a server at work, for a person and for a program."""

import asyncio
import os
import pty
import signal
import subprocess
import sys

from harness.cli.operate.ctl import draw
from harness.engines.scripted import ScriptStep
from harness.rollouts.client.session_server import (
    SampledBy,
    SessionList,
    SessionServerClient,
    SessionSummary,
    SessionTotals,
)
from harness.sessions.gate import GateReport, GateState, HoldKind, HoldReport
from harness.viewer.live.live_reading import LiveSessions, Reading
from harness.viewer.terminal import show
from tests.builders import user
from tests.harness_command import harness
from tests.session_servers.served import serving

LONG = ScriptStep(text="On and on it goes. " * 50, token_delay_s=0.2)


async def test_one_reading_has_sessions_holds_and_workers():
    """Of a session in the engine the tokens of the last second; the busiest first, and no more than are asked for."""
    async with serving(LONG) as client, asyncio.TaskGroup() as calls, SessionServerClient(client.url) as server:
        busy, _, _ = [await client.create() for _ in range(3)]
        call = calls.create_task(client.chat(busy, [user("Begin.")]))
        await client.sampling()
        await server.gate("holder-of-the-test").pause(deadline_s=10)
        reading = await asyncio.to_thread(harness, "ctl", "top", "--server", client.url, "--limit", "2", "--json")
        shown = await asyncio.to_thread(harness, "ctl", "top", "--server", client.url, "--once")
        call.cancel()

    document = reading.document
    first = document["sessions"][0]
    assert len(document["sessions"]) == 2
    assert (first["session_id"], first["state"], first["turns_in_flight"]) == (busy.session_id, "engine", 1)
    assert first["tokens_per_s"] > 0
    assert document["totals"]["states"] == {"engine": 1, "tool": 2}
    assert [each["holder"] for each in document["gate"]["holds"]] == ["holder-of-the-test"]
    assert [each["name"] for each in document["workers"]] == [""]
    assert busy.session_id[:12] in shown.stdout
    assert "hold      holder-of-the-test  pause, ends in" in shown.stdout


async def test_a_terminal_is_left_by_ctrl_c():
    """It is drawn again and again until then, and that is no failure."""
    async with serving() as client:
        session = await client.create()
        screen, end = pty.openpty()
        command = [sys.executable, "-m", "harness", "ctl", "top", "--server", client.url]
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}

        def watch() -> tuple[int, bytes]:
            with subprocess.Popen(command, stdout=end, env=env, start_new_session=True) as process:
                os.close(end)
                seen = b""
                while seen.count(session.session_id[:12].encode()) < 2:
                    seen += os.read(screen, 65_536)
                process.send_signal(signal.SIGINT)
                return process.wait(30), seen

        code, seen = await asyncio.to_thread(watch)
        os.close(screen)

    assert code == 0
    assert b"gate      open" in seen


def test_holders_and_workers_move_no_cursor(capsys):
    """Their names are somebody else's words."""
    hostile = "\x1b[2J\x07"
    session = SessionSummary("a" * 32, "open", 1, 0, hostile, 5)
    listed = SessionList(
        [session], SessionTotals({hostile: 1}), [SampledBy(hostile, hostile, hostile, 0, 0)], [hostile]
    )
    hold = HoldReport(hostile, HoldKind.PAUSE, ends_in_s=10.0)
    gate = GateReport(GateState.PAUSED, 1, 0, 1, 0, (hold,))
    live = LiveSessions()
    live.look({session.session_id: session}, 5, 0.0)
    show(draw(Reading(gate, listed, live)))
    printed = capsys.readouterr().out

    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert printed.count(r"\x1b[2J") == 7
