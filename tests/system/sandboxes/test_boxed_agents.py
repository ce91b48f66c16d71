"""An agent in a box plays its session and leaves nothing."""

CALL = """
import json, os, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=20) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
print("said", said)
"""
REPORT = """
json.dump({"home": os.environ["HOME"], "cwd": os.getcwd()}, open(os.environ["HARNESS_RESULT_FILE"], "w"))
"""


async def test_a_boxed_agent_plays_its_session(kind, spec_of, run_boxed, tmp_path):
    """One turn, one sample, a result; its home is its own, and gone afterwards."""
    rollout = await run_boxed(spec_of(kind), CALL + REPORT)
    workdir = tmp_path / "run" / "1"
    assert (rollout.outcome.kind, len(rollout.samples)) == ("finished", 1), (workdir / "agent.log").read_text()
    assert rollout.agent_result == {"home": str(workdir / ".home"), "cwd": str(workdir)}
    assert not (workdir / ".home").exists()


FEW_CPUS = """
began = time.monotonic()
while time.process_time() < 0.5:
    pass
assert time.monotonic() - began > 2, "expected a fifth of a processor"
"""


async def test_processors_are_limited(kind, spec_of, run_boxed):
    """Half a second of a fifth of a processor lasts longer than two, however busy the machine is."""
    rollout = await run_boxed(spec_of(kind, cpus=0.2), f"import time\n{FEW_CPUS}")
    assert "exit code 0" in rollout.outcome.detail, rollout.outcome


async def test_a_network_is_asked_for(kind, spec_of, run_boxed, tmp_path):
    """That of the engine or of this machine; the agent plays its session there, too."""
    look = "import socket\nassert len(socket.if_nameindex()) > 1\n"
    rollout = await run_boxed(spec_of(kind, network=True), look + CALL)
    log = (tmp_path / "run" / "1" / "agent.log").read_text()
    assert (rollout.outcome.kind, len(rollout.samples)) == ("finished", 1), log
