"""`agent.log` keeps the beginning and the end of what an agent printed, in bounded space."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rollouts.agents.agent_output import AgentLog
from tests.logged import capture_logs


@given(st.lists(st.binary(max_size=30)), st.integers(0, 40), st.integers(1, 40))
def test_nothing_is_lost_uncounted(tmp_path_factory: pytest.TempPathFactory, chunks, head_bytes, tail_bytes):
    """However the output is cut into chunks: head, note and tail add up."""
    path = tmp_path_factory.mktemp("log") / "agent.log"
    with AgentLog(path, head_bytes=head_bytes, tail_bytes=tail_bytes) as log:
        for chunk in chunks:
            log.write(chunk)

    whole = b"".join(chunks)
    missing = max(0, len(whole) - head_bytes - tail_bytes)
    note = f"\n[... {missing} bytes left out ...]\n".encode()
    kept = whole[:head_bytes] + note + whole[-tail_bytes:] if missing else whole
    assert path.read_bytes() == kept


def test_the_head_is_on_disk_at_once(tmp_path: Path):
    """A harness that is killed leaves a readable log."""
    with AgentLog(tmp_path / "agent.log") as log:
        log.write(b"first words\n")
        assert (tmp_path / "agent.log").read_bytes() == b"first words\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_does_not_disturb_the_agent():
    """The log stops growing and the harness says so once."""
    with capture_logs() as logs, AgentLog(Path("/dev/full")) as log:
        log.write(b"one")
        log.write(b"two")

    assert [line["event"] for line in logs] == ["agent_log_failed"]
