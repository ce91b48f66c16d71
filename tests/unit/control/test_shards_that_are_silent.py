"""A front whose shard does not answer has done a part of a verb: every report of a controller says which."""

import msgspec

from harness.engines.base import PauseMode
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.control.abort import abort_rollout
from harness.rollouts.control.pause import paused_rollout
from harness.rollouts.control.weights import ServersInUpdate
from harness.rollouts.control.weights_report import UpdateBudget, UpdateReport, UpdateStep
from harness.sessions.gate import GateReport, GateState
from harness.sessions.weights.weight_update import LiveWeights
from tests.session_servers.scripted import canned_server, http_answer

SILENT = "shard 1: did not answer within 3 s"
REPORT = GateReport(GateState.PAUSED, 1, 0, 0, 0, problems=(SILENT,))
ANSWER = http_answer(200, msgspec.json.encode(REPORT))


async def test_an_abort_and_a_pause_say_which_shard_was_not_told():
    """For each verb that was answered so; and nothing else is wrong."""
    async with canned_server(ANSWER) as front:
        aborted = await abort_rollout([], session_servers=[front.url])
        async with paused_rollout([front.url]) as paused:
            pass

    assert aborted.problems == (f"drain {front.url}: {SILENT}", f"resume {front.url}: {SILENT}")
    assert paused.problems == (f"pause {front.url}: {SILENT}",)


async def test_an_update_says_which_shard_was_not_told():
    async with canned_server(ANSWER) as front, SessionServerClient(front.url) as client:
        report = UpdateReport(1, PauseMode.ABORT)
        servers = ServersInUpdate([client], report, UpdateBudget())
        assert await servers.pause() is None
        await servers.resume(engines_continued=True)

    assert report.servers[0].errors == {UpdateStep.PAUSE_GATES: SILENT, UpdateStep.RESUME_GATES: SILENT}


async def test_an_update_says_which_shard_did_not_look_at_its_workers():
    """A worker that only this one would have fenced serves on."""
    weights = LiveWeights(1, {"a": "1"}, {}, (SILENT,))
    async with (
        canned_server(http_answer(200, msgspec.json.encode(weights))) as front,
        SessionServerClient(front.url) as client,
    ):
        report = UpdateReport(1, PauseMode.ABORT)
        await ServersInUpdate([client], report, UpdateBudget()).expect()

    assert report.problems == (f"{front.url}: {SILENT}",)
