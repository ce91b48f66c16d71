"""`harness serve --shards`: a front and two session servers as processes, as owners, agents and operators use them."""

import asyncio
import json
import os
import signal
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

import harness as harness_api
from harness.engines.scripted import ScriptStep
from harness.machine.asgi import listening
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.control.abort import abort_rollout
from tests.builders import user
from tests.fake_engines.fake_server import serving
from tests.fake_engines.fake_sglang import FakeSGLang
from tests.fake_engines.providers import scripted_engine
from tests.harness_command import harness
from tests.processes.family import is_running
from tests.shard_fleet import START_S, TOKEN, ShardFleet


async def chat(session: dict[str, str], text: str = "Hello.", **fields: Any) -> httpx.Response:
    """A model call of the session's agent, at the address that it was given."""
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.post(
            f"{session['base_url']}/v1/chat/completions",
            json={"messages": [user(text)], **fields},
            headers={"authorization": f"Bearer {session['api_key']}"},
        )


async def test_owners_need_the_front_alone_and_turns_never_pass_it(tmp_path: Path):
    """Sessions are spread; each is listed, read, collected and deleted at the front's address.

    A limit of the whole server is divided; the shard's refusal comes through as it is.
    """
    async with ShardFleet(tmp_path, "--limit=sessions=4") as fleet, fleet.client() as http:
        sessions = [(await http.post("/sessions", json={})).json() for _ in range(4)]
        too_many = await http.post("/sessions", json={})
        ids = {session["session_id"] for session in sessions}
        ports = {session["base_url"].split("/")[2] for session in sessions}
        answers = [(await chat(session)).json()["choices"][0]["message"]["content"] for session in sessions]
        listed = (await http.get("/sessions")).json()
        busiest = (await http.get("/sessions?limit=1")).json()
        samples = [(await http.get(f"/sessions/{each}/samples")).json()["samples"] for each in ids]
        for_miles = [(await http.post(f"/sessions/{each}/samples", json={})).status_code for each in ids]
        misdirected = await http.post(f"/sessions/{sessions[0]['session_id']}/v1/chat/completions", json={})
        by_key = await http.post("/v1/messages", headers={"x-api-key": sessions[1]["api_key"], "authorization": ""})
        of_google = {"x-goog-api-key": sessions[1]["api_key"], "authorization": ""}
        by_google_key = await http.post("/v1beta/models/m:generateContent", headers=of_google)
        never_seen = (await http.get("/sessions/never-seen")).json()
        metrics = (await http.get("/metrics")).text
        deleted = [(await http.delete(f"/sessions/{each}")).status_code for each in [*ids, *ids]]
        gate = (await http.get("/sessions/gate")).json()

    assert (too_many.status_code, too_many.headers["retry-after"]) == (429, "1")
    assert "at most 2 sessions" in too_many.json()["error"]["message"]
    assert len(ports) == 2
    assert fleet.url.partition("//")[2] not in ports
    assert answers == ["Understood."] * 4
    assert {each["session_id"] for each in listed["sessions"]} == ids
    assert (len(busiest["sessions"]), busiest["totals"]["turns"], busiest["totals"]["states"]) == (1, 4, {"tool": 4})
    assert [len(each) for each in samples] == [1] * 4
    assert for_miles == [200] * 4
    assert (misdirected.status_code, by_key.status_code, by_google_key.status_code) == (421, 421, 421)
    assert misdirected.headers["x-should-retry"] == "false"
    assert sessions[0]["base_url"] in misdirected.json()["error"]["message"]
    assert sessions[1]["base_url"].partition("/sessions")[0] in by_key.json()["error"]["message"]
    assert never_seen["phase"] == "unknown"
    assert 'harness_turns_total{shard="0",status="completed"} 2.0' in metrics
    assert deleted == [204] * 8
    assert gate["sessions"] == 0


async def test_rights_are_those_of_a_session_server(tmp_path: Path):
    """Without the admin token the front says that it is alive, and nothing else; a shard's gate is nobody's but its.

    A telling of an operator does not outlive the next one of the front.
    """
    async with (
        ShardFleet(tmp_path) as fleet,
        httpx.AsyncClient(base_url=fleet.url, timeout=30) as stranger,
        fleet.client() as http,
    ):
        session = (await http.post("/sessions")).json()
        refused = {
            (method, path): (await stranger.request(method, path)).status_code
            for method, path in [
                ("POST", "/sessions"),
                ("GET", "/sessions"),
                ("GET", f"/sessions/{session['session_id']}"),
                ("DELETE", f"/sessions/{session['session_id']}"),
                ("POST", "/sessions/pause"),
                ("GET", "/metrics"),
            ]
        }
        health = (await stranger.get("/health")).json()
        shard = session["base_url"].partition("/sessions")[0]
        elsewhere_id = f"{int(session['session_id'][:2], 16) + 1:02x}" + "5" * 30
        own_gate = await http.post(f"{shard}/sessions/resume")
        telling = {"start": "another", "telling": 10**18, "standing": {"epoch": 1, "holds": []}}
        told = await stranger.put(f"{shard}/sessions/shard", json=telling)
        told_by_an_operator = await http.put(f"{shard}/sessions/shard", json=telling)
        paused = (await http.post("/sessions/pause")).json()
        gates = [each["gate"] for each in (await http.get("/health")).json()["shards"]]
        await http.post("/sessions/resume")
        elsewhere = await http.post(f"{shard}/sessions", json={"session_id": elsewhere_id})
        agents = (await chat({**session, "api_key": "sk-harness-wrong"})).status_code

    assert set(refused.values()) == {401}
    assert health == {"status": "alive"}
    assert (own_gate.status_code, own_gate.json()["error"]["code"]) == (421, "misdirected")
    assert told.status_code == 401
    assert told_by_an_operator.json()["telling"] == 10**18
    assert (paused["problems"], gates) == ([], ["paused", "paused"])
    assert elsewhere.status_code == 400
    assert agents == 404


async def test_a_chosen_id_and_a_takeover_stay_where_they_belong(tmp_path: Path):
    """The first byte says where, modulo the number of shards; a takeover finds the turns there."""
    async with ShardFleet(tmp_path) as fleet, fleet.client() as http:
        chosen = [
            (await http.post("/sessions", json={"session_id": f"{byte:02x}" + "5" * 30})).json() for byte in (254, 255)
        ]
        again = await http.post("/sessions", json={"session_id": chosen[0]["session_id"]})
        assert (await chat(chosen[1])).status_code == 200
        await http.post(f"/sessions/{chosen[1]['session_id']}/end")
        taken_over = await http.post("/sessions", json={"resumes": chosen[1]["session_id"]})
        assert taken_over.status_code == 200, taken_over.text
        successor = taken_over.json()
        facts = (await http.get(f"/sessions/{successor['session_id']}/facts")).json()
        elsewhere = await http.post(
            "/sessions", json={"resumes": successor["session_id"], "session_id": chosen[0]["session_id"]}
        )

    assert chosen[0]["base_url"].split("/")[2] != chosen[1]["base_url"].split("/")[2]
    assert again.status_code == 400
    assert successor["base_url"].split("/")[2] == chosen[1]["base_url"].split("/")[2]
    assert facts["turns"] == {"completed": 1}
    assert elsewhere.status_code == 400


async def test_a_shard_that_dies_comes_back_on_its_port_with_its_sessions(tmp_path: Path):
    """The turn continues at the same address; meanwhile sessions go to the other one."""
    async with ShardFleet(tmp_path) as fleet, fleet.client() as http:
        sessions = [(await http.post("/sessions")).json() for _ in range(2)]
        assert (await chat(sessions[0])).status_code == 200
        number = int(sessions[0]["session_id"][:2], 16)
        fleet.kill_shard(number)
        created = await http.post("/sessions")
        facts = (await http.get(f"/sessions/{sessions[0]['session_id']}/facts")).json()
        await fleet.serves()
        again = await chat(sessions[0], "Another.")

    assert created.status_code == 200
    assert facts["turns"] == {"completed": 1}
    assert again.status_code == 200


async def test_a_hold_outlives_everybody(tmp_path: Path):
    """Shards, then the front: whoever comes up again is shut until its holder releases it, and turns go on then.

    The watchdog is killed before the front, so its shards survive it: the next front ends them by the record.
    """
    async with ShardFleet(tmp_path) as fleet:
        async with fleet.client() as http, SessionServerClient(fleet.address) as client:
            session = (await http.post("/sessions")).json()
            gate = client.gate("holder", 600.0)
            await gate.pause(deadline_s=START_S)
            turn = asyncio.create_task(chat(session))
            for number in range(2):
                fleet.kill_shard(number)
            shut = await fleet.serves()
            left = fleet.shard_pids()
            fleet.kill_watchdog()
            await fleet.kill_front()
            assert all(is_running(pid) for pid in left)
        with suppress(httpx.TransportError):
            await turn
        await fleet.start()
        assert not any(is_running(pid) for pid in left)
        async with SessionServerClient(fleet.address) as client:
            still = await client.gate().report(deadline_s=START_S)
            turn = asyncio.create_task(chat(session))
            while not (await client.gate().report(deadline_s=START_S)).held:
                await asyncio.sleep(0.02)
            opened = await client.gate("holder").resume(deadline_s=START_S)
            answered = await turn

    assert shut["state"] == "paused"
    assert still.state == "paused"
    assert opened.state == "open"
    assert opened.released == 1 or opened.problems
    assert answered.status_code == 200


async def test_a_drain_reaches_a_shard_that_was_dead(tmp_path: Path):
    """Its sessions end when it comes up, though the gate is open by then; those that begin afterwards continue."""
    async with ShardFleet(tmp_path) as fleet, fleet.client() as http:
        before = [(await http.post("/sessions")).json() for _ in range(2)]
        fleet.kill_shard(1)
        drained = (await http.post("/sessions/drain", json={"holder": "abort"})).json()
        await http.post("/sessions/resume", json={"holder": "abort"})
        await fleet.serves()
        ended = [(await chat(session)).status_code for session in before]
        after = (await http.post("/sessions")).json()
        served = (await chat(after)).status_code

    assert drained["state"] == "draining"
    assert len(drained["problems"]) <= 1
    assert ended == [404, 404]
    assert served == 200


async def test_a_shard_that_hangs_costs_a_verb_its_deadline_and_a_line(tmp_path: Path):
    """And nothing else: the other one is told, the report comes, and the silent one is told when it wakes up.

    A session whose creation it does not answer is made at the other one, and is not there twice.
    """
    async with ShardFleet(tmp_path) as fleet, fleet.client() as http:
        silent = fleet.shard_pids()[1]
        os.kill(silent, signal.SIGSTOP)
        try:
            made = [(await http.post("/sessions")).json() for _ in range(3)]
            report = (await http.post("/sessions/pause", json={"holder": "x"})).json()
            health = await http.get("/health")
        finally:
            os.kill(silent, signal.SIGCONT)
        later = await fleet.serves()
        session = asyncio.create_task(http.post("/sessions"))
        await http.post("/sessions/resume", json={"holder": "x"})
        created = await session
        while len((await http.get("/sessions")).json()["sessions"]) != 4:
            await asyncio.sleep(0.05)

    assert {each["session_id"][:2] for each in made} == {"00"}
    assert report["state"] == "paused"
    assert [line[:8] for line in report["problems"]] == ["shard 1:"]
    assert (health.status_code, health.json()["status"]) == (503, "shard_unavailable")
    assert later["state"] == "paused"
    assert created.status_code == 200


async def test_a_controller_needs_the_address_of_the_front(tmp_path: Path):
    """An abort of everything, and one of a session by its id."""
    async with ShardFleet(tmp_path) as fleet, fleet.client() as http:
        sessions = [(await http.post("/sessions")).json() for _ in range(3)]
        one = await abort_rollout([], session_servers=[fleet.address], sessions=[sessions[0]["session_id"]])
        phases = [(await http.get(f"/sessions/{each['session_id']}/facts")).json()["phase"] for each in sessions]
        everything = await abort_rollout([], session_servers=[fleet.address])
        ended = [(await chat(session)).status_code for session in sessions]
        gate = (await http.get("/sessions/gate")).json()

    assert one.problems == ()
    assert [phase == "open" for phase in phases] == [False, True, True]
    assert everything.problems == ()
    assert everything.drained[0].gate is not None
    assert everything.drained[0].gate.sessions_closed == 2
    assert ended == [404] * 3
    assert gate["state"] == "open"


async def test_a_rollout_manager_and_a_weight_update_need_the_address_of_the_front(tmp_path: Path):
    """Sessions are created, talked to at their shards, swept, paused and continued, ended, collected and deleted."""
    engine = FakeSGLang(scripted_engine(ScriptStep(text="Understood.")))
    at_work = asyncio.Event()

    async def agent(
        base_url: str, prompt: str, request_kwargs: dict[str, Any], metadata: Any, *, session_id: str, api_key: str
    ) -> dict[str, str]:
        session = {"base_url": base_url.removesuffix("/v1"), "api_key": api_key}
        assert (await chat(session, prompt)).status_code == 200
        await at_work.wait()
        return {
            "shard": session_id[:2],
            "said": (await chat(session, "More.")).json()["choices"][0]["message"]["content"],
        }

    async with (
        engine.engine,
        serving(engine, notices_disconnects=False),
        ShardFleet(tmp_path, engine=f"sglang={engine.url}") as fleet,
        harness_api.SessionManager(fleet.url, admin_token=TOKEN, engines=[f"sglang={engine.url}"]) as manager,
        asyncio.TaskGroup() as tasks,
    ):
        task = harness_api.AgentTask(harness_api.FunctionAgent("a", agent), "Hello.", tmp_path / "work", model="m")
        runs = [tasks.create_task(manager.run(replace(task, workdir=tmp_path / f"{n}"))) for n in range(4)]
        while sum(len(body["input_ids"]) > 20 for body in engine.bodies) < 4:
            await asyncio.sleep(0.02)
        async with manager.updating_weights(1) as update:
            at_work.set()
            await update.apply(Path("/weights/b"))
        rollouts = [await run for run in runs]
        async with fleet.client() as http:
            left = (await http.get("/sessions")).json()["sessions"]

    assert update.report.problems == ()
    assert [rollout.outcome.kind.value for rollout in rollouts] == ["finished"] * 4
    assert {rollout.agent_result["shard"] for rollout in rollouts if rollout.agent_result} == {"00", "01"}
    assert [len(rollout.samples) for rollout in rollouts] == [2] * 4, "two prompts that have nothing in common"
    assert left == []


async def test_engines_that_a_dead_controller_has_left_are_continued_through_a_shard(tmp_path: Path):
    """The hold is the front's, the engines are the shards'."""
    engine = FakeSGLang(scripted_engine(ScriptStep(text="Understood.")))
    async with (
        engine.engine,
        serving(engine, notices_disconnects=False),
        ShardFleet(tmp_path, engine=f"sglang={engine.url}") as fleet,
        fleet.client() as http,
    ):
        session = (await http.post("/sessions")).json()
        await http.post(f"{engine.url}/pause_generation", json={"mode": "abort"})
        await http.post("/sessions/pause", json={"holder": "dead", "ttl_s": 0.5, "engines": True})
        answered = await chat(session)
        while (await http.get("/health")).json()["left_paused"]:  # the front hears of it after the session
            await asyncio.sleep(0.02)

    assert answered.status_code == 200


async def test_a_shard_that_dies_under_an_update_does_not_continue_its_engines(tmp_path: Path):
    """Though the operator wanted them continued when the front began: the shard waits until the update is done."""
    engine = FakeSGLang(scripted_engine(ScriptStep(text="Understood.")))
    async with (
        engine.engine,
        serving(engine, notices_disconnects=False),
        ShardFleet(tmp_path, "--continue-engines", engine=f"sglang={engine.url}") as fleet,
        fleet.client() as http,
    ):
        await http.post("/sessions/pause", json={"holder": "update", "ttl_s": 600, "engines": True})
        await http.post(f"{engine.url}/pause_generation", json={"mode": "retract"})
        asked = len(engine.bodies)
        fleet.kill_shard(1)
        while len(engine.bodies) == asked:  # it tests its engine, after it would have continued it
            await asyncio.sleep(0.02)
        is_paused = (await engine.engine.health()).paused
        await http.post(f"{engine.url}/continue_generation")
        await http.post("/sessions/resume", json={"holder": "update", "engines_continued": True})
        report = await fleet.serves()

    assert is_paused
    assert report["state"] == "open"


async def test_the_front_ends_with_everybody_when_it_is_told_to(tmp_path: Path):
    """No process is left, and the exit code is that of a server that was stopped."""
    fleet = ShardFleet(tmp_path)
    await fleet.start()
    assert await fleet.stop(signal.SIGINT) == 0


def refused(*options: str | Path) -> tuple[int, str]:
    """Exit code and the line of a front that cannot begin."""
    ended = harness("serve", "--port=0", "--json", *options, env={"HARNESS_ADMIN_TOKEN": TOKEN})
    assert len([line for line in ended.stderr.splitlines() if line.startswith("harness: ")]) == 1
    return ended.code, ended.document["error"]["message"]


async def test_what_cannot_be_served_is_said_in_one_line_and_leaves_nothing(tmp_path: Path):
    """A directory for another number, or in use; a port of somebody else's; what only a shard finds out."""
    async with ShardFleet(tmp_path) as fleet:
        toy = f"--tokenizer={tmp_path / 'toy'}"
        folder = f"--store={fleet.folder}"
        in_use = await asyncio.to_thread(refused, "--shards=2", "--engine=scripted", toy, folder)
        await fleet.stop()
        other_n = await asyncio.to_thread(refused, "--shards=3", "--engine=scripted", toy, folder)
        ports = json.loads((fleet.folder / "shards.json").read_bytes())["ports"]
        with closing(listening("127.0.0.1", ports[1])) as listener:
            listener.listen()
            taken = await asyncio.to_thread(refused, "--shards=2", "--engine=scripted", toy, folder)
        nobody = "--engine=sglang=http://127.0.0.1:1"
        no_tokenizer = await asyncio.to_thread(refused, "--shards=2", nobody, f"--store={tmp_path / 'b'}")
        bound = await asyncio.to_thread(refused, "--shards=3", nobody, f"--store={tmp_path / 'b'}")
        kept = (fleet.folder / "shards.json").rename(tmp_path / "kept.json")
        lost = await asyncio.to_thread(refused, "--shards=2", "--engine=scripted", toy, folder)
        kept.rename(fleet.folder / "shards.json")
        await fleet.start()

    assert in_use[0] == 6
    assert "another server uses it" in in_use[1]
    assert other_n[0] == 4
    assert "made for 2 shards, not for 3" in other_n[1]
    assert taken[0] == 6
    assert f"shard 1: cannot listen on 127.0.0.1:{ports[1]}" in taken[1]
    assert no_tokenizer[0] == 4
    assert "no tokenizer" in no_tokenizer[1]
    assert bound[0] == 4
    assert "no tokenizer" in bound[1]
    assert lost[0] == 6
    assert "expected shards.json next to the stores of 2 shards" in lost[1]
