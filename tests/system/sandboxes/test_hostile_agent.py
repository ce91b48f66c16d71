"""A hostile agent reaches nothing that is not its own, in each kind of box."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.session_server import SessionServerClient

ADMIN_TOKEN = "the-admin-token-of-a-test"
VICTIM_MARK = "victim-of-a-hostile-agent"
LEAST_ATTEMPTS = 30
HOSTILE = Path(__file__).with_name("hostile_agent.py").read_text(encoding="utf-8")


@pytest.fixture(name="victim")
def _victim():
    command = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(300)", VICTIM_MARK)
    with subprocess.Popen(command, env={**os.environ, "VICTIM": "1"}) as process:
        yield process.pid
        assert process.poll() is None, "the hostile agent ended a process of the host"
        process.kill()


async def test_a_hostile_agent_reaches_nothing_of_others(
    *, kind, spec_of, run_boxed, server, victim, tmp_path, monkeypatch
):
    """Other sessions, admin routes, files, processes, networks, namespaces: everything is refused."""
    monkeypatch.setenv("HARNESS_ADMIN_TOKEN", ADMIN_TOKEN)
    store, other_file, user_file = (tmp_path / name for name in ("store.db", "run/2/secret", "home/.netrc"))
    for file in (store, other_file, user_file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("a secret", encoding="utf-8")
    shared = Path("/dev/shm") / f"harness-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
        name = f"harness-test-{os.getpid()}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        named.bind(str(tmp_path / "s"))
        named.listen()
        shared.touch()
        client = SessionServerClient(SessionServerAddress(server.url, None))
        try:
            other = await client.create({})
            disk = next(Path("/sys/block").iterdir())
            told = {
                "other_id": other.session_id,
                "other_key": other.api_key,
                "server_port": httpx.URL(server.url).port,
                "host_addresses": sorted({each[4][0] for each in socket.getaddrinfo(socket.gethostname(), None)}),
                "abstract_socket": name,
                "host_socket": str(tmp_path / "s"),
                "store": str(store),
                "other_file": str(other_file),
                "user_file": str(user_file),
                "admin_token_backwards": ADMIN_TOKEN[::-1],
                "victim_pid": victim,
                "victim_mark": VICTIM_MARK,
                "namespaces": {
                    each: str(Path(f"/proc/self/ns/{each}").readlink()) for each in ("pid", "mnt", "net", "ipc", "uts")
                },
                "disk": list(map(int, (disk / "dev").read_text().split(":"))),
                "shared_memory": shared.name,
            }
            rollout = await run_boxed(spec_of(kind), HOSTILE, metadata=told)
            assert [each.session_id for each in await client.sessions()] == [other.session_id]
        finally:
            shared.unlink()
            await client.close()
    log = (tmp_path / "run" / "1" / "agent.log").read_text()
    results = rollout.agent_result
    assert results is not None, (rollout.outcome, log)
    for attempt, result in results.items():
        print(f"{kind:8}  {attempt:44}  {result}")
    assert {attempt: result for attempt, result in results.items() if not result.startswith("refused: ")} == {}
    assert len(results) >= LEAST_ATTEMPTS
    assert [path.name for path in (tmp_path / "run" / "2").iterdir()] == ["secret"]


async def test_bwrap_shows_certificates_and_no_private_key(spec_of, run_boxed):
    """/etc/ssl and /etc/pki of this machine hold both."""
    keys = ("/etc/ssl/private", "/etc/pki/tls/private")
    script = f"import os; raise SystemExit(any(map(os.path.exists, {keys})) or not os.listdir('/etc/ssl/certs'))"
    rollout = await run_boxed(spec_of("bwrap"), script)
    assert "exit code 0" in rollout.outcome.detail, rollout.outcome
