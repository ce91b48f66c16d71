"""Where the seconds of a turn went, in the log and in the metrics; and how long prompts were."""

import asyncio
import re

from harness.engines.scripted import ScriptStep
from harness.server.admitted import TURN_ENDED
from tests.builders import user
from tests.logged import capture_logs
from tests.session_servers.served import serving, session_on

SLOW = ScriptStep(text="Well.", delay_s=0.3)


async def test_the_parts_of_a_turn_are_told_apart():
    """A turn that waited at the gate and then for a slow engine: no less than each took, and nothing in a queue."""
    with capture_logs() as logs:
        async with serving(SLOW) as client, asyncio.TaskGroup() as calls:
            session = await client.create()
            await client.http.post("/sessions/pause", json={"holder": "h"})
            call = calls.create_task(client.chat(session, [user("Begin.")]))
            await client.held(1)
            await asyncio.sleep(0.2)
            await client.http.post("/sessions/resume", json={"holder": "h"})
            assert (await call).status_code == 200
            metrics = (await client.http.get("/metrics")).text
    [line] = [line for line in logs if line["event"] == TURN_ENDED]

    assert line["gate_s"] >= 0.19
    assert line["engine_s"] >= 0.29
    assert line["queue_s"] == 0
    for part in ("gate", "queue", "engine"):
        [total] = re.findall(rf'harness_turn_seconds_sum{{part="{part}"}} (\S+)', metrics)
        assert abs(float(total) - line[f"{part}_s"]) < 0.001


async def test_prompts_and_what_was_cached_of_them_are_counted():
    """The second prompt has the first turn in it, which the engine may have cached."""
    async with session_on(ScriptStep(text="One."), ScriptStep(text="Two.")) as (client, session):
        first = await client.say(session, [user("Begin.")])
        await client.say(session, [user("Begin."), first, user("Go on.")])
        turns = (await client.record(session))["turns"]
        metrics = (await client.http.get("/metrics")).text

    cached = sum(turn["notes"].get("cached_tokens", 0) for turn in turns)
    assert f"harness_prompt_tokens_total {sum(len(turn['prompt_ids']) for turn in turns):.1f}" in metrics
    assert f"harness_cached_prompt_tokens_total {cached:.1f}" in metrics
