"""A server among clients that mean harm, and two that do not."""

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from harness.types import Json, Message
from tests.builders import user
from tests.session_servers.served import Served, bearer, url_of
from tests.system.abuse.hostile_requests import Prey, hostile_requests
from tests.system.abuse.siege import PATIENCE_S, Host, besiege, serve

LEAST_TURNS = 10
PROMPTS = ("MARKER", "obey", "__globals__")
TIMES = ("created_at", "seconds")


@dataclass
class Guest:
    """An agent that behaves."""

    session: Served
    marker: str
    stream: bool
    turns: int = 0
    messages: list[Message] = field(default_factory=list)

    async def talk(self, host: Host, *, until: asyncio.Event | None = None, turns: int = LEAST_TURNS) -> None:
        """Take `turns`, and continue `until` that happens."""
        async with httpx.AsyncClient(base_url=host.http.base_url, timeout=PATIENCE_S) as http:
            while self.turns < turns or (until is not None and not until.is_set()):
                self.messages.append(user(f"{self.marker} says {self.turns}"))
                body = {"messages": self.messages, "stream": self.stream}
                answer = await http.post(url_of(self.session), json=body, headers=bearer(self.session.api_key))
                assert answer.status_code == 200, answer.text
                self.messages.append({"role": "assistant", "content": self._said(answer)})
                self.turns += 1
                await asyncio.sleep(0.02)

    def _said(self, answer: httpx.Response) -> str:
        if not self.stream:
            content: str = answer.json()["choices"][0]["message"]["content"]
            return content
        parts = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [choice for part in parts for choice in json.loads(part)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    async def judge(self, host: Host) -> None:
        """Its record is that of a session that says the same words to a server that is left in peace."""
        twin = Guest(await host.create(self.marker), self.marker, self.stream)
        await twin.talk(host, turns=self.turns)
        assert self.messages == twin.messages
        records = [await host.read(f"/sessions/{each.session.session_id}?ids=prompts") for each in (self, twin)]
        for turn, other in zip(*map(comparable, records), strict=True):
            assert turn == other
        assert records[0]["ledger"] == records[1]["ledger"]
        await host.http.delete(f"/sessions/{twin.session.session_id}")


def comparable(record: Json) -> list[Json]:
    """Its turns, without what differs between any two sessions."""
    turns = [{name: value for name, value in turn.items() if name not in TIMES} for turn in record["turns"]]
    for turn in turns:
        turn["sampling"]["used"].pop("seed", None)
        del turn["notes"]["response_id"]
        for segment in turn["segments"]:
            for name in ("request_id", "began_at", "seconds", "queued_s"):
                del segment[name]
    return turns


async def test_clients_that_mean_harm_get_nothing_and_leave_nothing_behind(tmp_path: Path) -> None:
    """No 5xx, no word of another session, nothing that stays, and the record of those beside them is exact."""
    async with serve(tmp_path) as host:
        guests = [
            Guest(await host.create(f"MARKER-{name}"), f"MARKER-{name}", stream)
            for name, stream in (("ALPHA", False), ("BETA", True))
        ]
        own, gone = await host.create("own"), await host.create("gone")
        await host.http.delete(f"/sessions/{gone.session_id}")
        prey = Prey(own.session_id, own.api_key, guests[0].session.session_id, gone.api_key)
        before, descriptors = await host.held(), host.descriptors()
        hostiles = list(hostile_requests(prey))
        assert len({each.name for each in hostiles}) == len({(*each.pieces, each.ending) for each in hostiles}) >= 300

        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for guest in guests:
                group.create_task(guest.talk(host, until=is_over))
            answers = await besiege(host, hostiles)
            is_over.set()

        async with asyncio.timeout(PATIENCE_S):
            while await host.held() != before or host.descriptors() > descriptors:
                await asyncio.sleep(0.1)
        for guest in guests:
            await guest.judge(host)
        metrics = await host.metrics()

    judge(answers, [*(guest.marker for guest in guests), host.token, *(guest.session.api_key for guest in guests)])
    assert not [name for name in metrics if 'code="internal_error"' in name]
    log = (tmp_path / "serve.log").read_text()
    assert "Traceback" not in log
    assert "request_failed" not in log
    sessions = [own, gone, *(guest.session for guest in guests)]
    secrets = [host.token, *(each.api_key for each in sessions), *(each.session_id for each in sessions)]
    assert not [secret for secret in (*secrets, *PROMPTS) if secret in log]


def judge(answers: dict[str, bytes], secrets: list[str]) -> None:
    """Fail for whatever a hostile client was answered that it should not have been."""
    statuses: Counter[Any] = Counter()
    for name, answer in answers.items():
        found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d\d\d) ", answer)]
        assert not [status for status in found if status >= 500], (name, answer[:400])
        assert not [secret for secret in secrets if secret.encode() in answer], (name, answer[:400])
        statuses.update(found)
    assert set(statuses) <= {100, 200, 400, 401, 404, 405, 408, 413, 429, 431}, statuses
