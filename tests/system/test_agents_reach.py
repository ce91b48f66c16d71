"""What an agent can reach, tried by agents: real processes that know their environment and nothing else.

Two of them run at a time. Each tries every route of the application, for its own session and for the other's, with
nothing, with its own key and with made-up ones; both then take a last turn. Routes come from the application: one that
is added has to refuse agents, or be judged here.
"""

import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.gateway.router.gateway_program import gateway_program
from harness.rollouts.agents.task import AgentTask, ProgramAgent
from harness.rollouts.manager import SessionManager
from harness.suite.record.rollout_table import read_rollouts
from server_patch.router.verbs import VERBS
from tests.fake_engines.workers import worker_processes
from tests.harness_command import announced, harness, start_harness, wait, write_scenario
from tests.router_process import routing
from tests.session_servers.served import serving
from tests.toy_model import write_toy_model

Route = tuple[str, str]

AGENT = """
# /// script
# requires-python = ">=3.11"
# ///
import json, os, pathlib, time, urllib.error, urllib.request

env = dict(os.environ)
asked = json.loads(env["HARNESS_METADATA"])
host, own = env["OPENAI_BASE_URL"].removesuffix("/v1").split("/sessions/")
key = env["OPENAI_API_KEY"]
HELLO = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 64}
PARTS = {"contents": [{"role": "user", "parts": [{"text": "Hello."}]}]}
NAMES = {"{version}": "v1beta", "{model:path}": "m", "{method}": "generateContent"}
CALLS = {":generateContent": PARTS, ":countTokens": PARTS, "/responses": {"input": "Hello."}}
CALLS |= {"/completions": HELLO, "/messages": HELLO, "/count_tokens": HELLO}
seen = []

def ask(method, path, headers):
    said = next((call for end, call in CALLS.items() if path.endswith(end)), {})
    body = json.dumps(said).encode() if method in ("POST", "PUT") else None
    request = urllib.request.Request(host + path, body, {"content-type": "application/json", **headers}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()

def turn():
    return ask("POST", f"/sessions/{own}/v1/chat/completions", {"authorization": f"Bearer {key}"})[0]

def meet(name):
    meeting = pathlib.Path(asked["meeting"])
    (meeting / f"{own}.{name}").touch()
    deadline = time.monotonic() + 90
    while len(there := sorted(meeting.glob(f"*.{name}"))) < 2:
        assert time.monotonic() < deadline, "the other agent did not come"
        time.sleep(0.02)
    return next(path.stem for path in there if path.stem != own)

turns = [turn()]
other = meet("here")
credentials = {
    "nothing": {},
    "own key": {"authorization": f"Bearer {key}"},
    "own key, the other way": {"x-api-key": key},
    "made up": {"authorization": "Bearer sk-harness-" + 32 * "0"},
    "no key at all": {"authorization": "Basic YWRtaW46YWRtaW4="},
}
for method, route in asked["routes"]:
    for whose, session in (("own", own), ("other", other)):
        for name, headers in credentials.items():
            path = route.replace("{id}", session)
            for place, value in NAMES.items():
                path = path.replace(place, value)
            status, text = ask(method, path, headers)
            seen.append([method, route, whose, name, status, text.replace(own, "OWN").replace(other, "OTHER")[:200]])
commands = [pathlib.Path(f"/proc/{pid}/cmdline").read_text() for pid in ("self", os.getppid())]
arguments = [word for command in commands for word in command.split("\\0")]
for value in {*env.values(), *arguments}:
    if value.isascii() and value.isprintable() and value.strip():
        status, _ = ask("GET", "/sessions", {"authorization": "Bearer " + value})
        seen.append(["GET", "/sessions", "other", "something it was given", status, ""])
meet("done")
turns.append(turn())
pathlib.Path(env["HARNESS_RESULT_FILE"]).write_text(json.dumps({"turns": turns, "seen": seen, "env": env}))
"""

LIVENESS: Mapping[Route, set[str]] = {
    ("GET", "/health"): {'{"status":"alive"}'},
    ("HEAD", "/health"): {""},
    ("HEAD", "/sessions/{id}"): {""},
    **{("HEAD", f"/sessions/{{id}}{rest}"): {""} for rest in ("/", "/v1", "/api/hello")},
    **{
        ("GET", f"/sessions/{{id}}{rest}"): {
            f'{{"session_id":"{whose}","object":"session"}}' for whose in ("OWN", "OTHER")
        }
        for rest in ("/", "/v1", "/api/hello")
    },
}
"""Open to everybody: what stands there is the same for a session that is and one that is not."""

OWN: set[Route] = {
    *(
        ("POST", f"{prefix}/v1/{call}")
        for call in ("chat/completions", "messages", "messages/count_tokens", "responses")
        for prefix in ("/sessions/{id}", "")
    ),
    *(
        ("POST", f"{prefix}/{{version}}/models/{{model:path}}:{call}")
        for call in ("{method}", "countTokens")
        for prefix in ("/sessions/{id}", "")
    ),
    *((method, f"{prefix}/v1/models") for method in ("GET", "HEAD") for prefix in ("/sessions/{id}", "")),
}
"""Open to the session's own key, for that session."""


CHECK = """
def score(session, result, metadata):
    return {"reward": len(session["turns"]), "answer": metadata["answer"]}
"""


async def routes_of_a_session_server() -> list[Route]:
    """Every method and path of the application."""
    async with serving() as client:
        routes: Any = client.server.app().routes  # each a `starlette.routing.Route`
    return sorted((method, route.path) for route in routes for method in route.methods)


def judge(result: dict[str, Any], liveness: Mapping[Route, set[str]]) -> int:
    """Fail for whatever an agent was given that is not its own; the number of turns that were its own."""
    for method, route, whose, credential, status, text in result["seen"]:
        what = f"{method} {route} of {whose} with {credential}: {status} {text}"
        if (method, route) in liveness:
            assert (status, text in liveness[method, route]) == (200, True), what
        elif (method, route) in OWN and credential.startswith("own key") and (whose == "own" or "{id}" not in route):
            assert status == 200, what
        else:
            assert status in (401, 404), what
            assert "OTHER" not in text, what
    assert result["turns"] == [200, 200]
    return 2 + sum(
        row[4] == 200
        for row in result["seen"]
        if row[1].endswith(("/completions", "/messages", "/responses", ":{method}"))
    )


async def try_everything(
    url: str, admin_token: str, routes: Sequence[Route], liveness: Mapping[Route, set[str]], tmp_path: Path
) -> None:
    """Two agents of one manager try `routes`; what they were not given stays as it was."""
    (tmp_path / "meeting").mkdir()
    (tmp_path / "agent.py").write_text(AGENT)
    agent = ProgramAgent("prying", (sys.executable, "-S", str(tmp_path / "agent.py")))
    metadata = {"routes": routes, "meeting": str(tmp_path / "meeting")}
    tasks = [
        AgentTask(agent, "Look around.", tmp_path / str(index), "m", deadline_s=120, metadata=metadata)
        for index in range(2)
    ]
    async with SessionManager(url, admin_token=admin_token) as manager:
        rollouts = await asyncio.gather(*(manager.run(task) for task in tasks))
    for rollout, task in zip(rollouts, tasks, strict=True):
        assert rollout.agent_result is not None, (task.workdir / "agent.log").read_text()
        files = [path for path in task.workdir.rglob("*") if path.is_file()]
        assert not [path for path in files if admin_token in path.read_text(errors="replace")]
        assert len(rollout.session["turns"]) == judge(rollout.agent_result, liveness)


async def test_no_route_of_a_server_gives_an_agent_what_is_not_its_own(tmp_path: Path) -> None:
    """`harness serve`, whose engine takes control verbs; one that it does not have is a route like any other."""
    toy = write_toy_model(tmp_path / "toy")
    verbs = [(method, path) for path, verb in VERBS.items() for method in verb.methods]
    routes = [*await routes_of_a_session_server(), *verbs]
    command = ("serve", "--engine", "scripted", "--tokenizer", toy, "--port", "0", "--json")
    process = start_harness(*command, log=tmp_path / "serve.log")
    try:
        document = await asyncio.to_thread(announced, process)
        await try_everything(document["url"], document["admin_token"], routes, LIVENESS, tmp_path)
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(wait, process)


async def test_no_route_of_a_router_gives_an_agent_what_is_not_its_own(tmp_path: Path) -> None:
    """`harness router`: its verbs, and whatever is the gateway's."""
    await gateway_program("smg", print)  # installed before the clock of the router runs
    own = [route for route in await routes_of_a_session_server() if route[1].startswith("/sessions")]
    verbs = [(method, path) for path, verb in VERBS.items() for method in verb.methods]
    read = [
        "/router",
        "/router/metrics",
        "/router/health",
        "/health",
        "/metrics",
        "/workers",
        "/v1/models",
        "/nonsense",
    ]
    asked = [(method, path) for path in read for method in ("GET", "HEAD")]
    posted = [("POST", path) for path in ("/workers", "/generate", "/v1/chat/completions", "/v1/completions")]
    liveness = {(method, path.replace("/health", "/router/health")): said for (method, path), said in LIVENESS.items()}
    async with worker_processes() as workers, routing(tmp_path, "--worker-urls", (await workers.start()).url) as router:
        token = router.http.headers["authorization"].removeprefix("Bearer ")
        url = str(router.http.base_url).rstrip("/")
        await try_everything(url, token, [*own, *verbs, *asked, *posted], liveness, tmp_path)


async def test_no_route_of_a_run_gives_an_agent_what_is_not_its_own(tmp_path: Path) -> None:
    """`harness run`: nor is what only the check sees in anything that an agent is given."""
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    prompt = {
        "metadata": {"routes": await routes_of_a_session_server(), "meeting": str(meeting)},
        "check_metadata": {"answer": "7531 is the answer"},
    }
    scenario = write_scenario(
        tmp_path / "prying", program=AGENT, check=CHECK, prompts=[prompt], samples_per_prompt=2, concurrency=2
    )
    ended = await asyncio.to_thread(harness, "run", scenario, "--out", tmp_path / "run", timeout_s=200)

    assert ended.code == 0, ended.stdout + ended.stderr
    for number, record in read_rollouts(tmp_path / "run" / "run.db").items():
        assert record.agent_result is not None
        assert record.reward == record.session.turns == judge(record.agent_result, LIVENESS)
        assert record.score == {"answer": "7531 is the answer"}
        given = [path.read_text(errors="replace") for path in (tmp_path / "run" / "sessions" / str(number)).iterdir()]
        assert not [text for text in (*given, str(record.samples)) if "7531" in text]
