"""The public address of several shards: the gate, weight updates, and combined reports.

    POST /sessions              sent to the shard with the fewest sessions; `base_url` has that shard's address
    /sessions/{id}/...          requests of owners, forwarded to the session's shard (`front_sessions`)
    gate verbs                  decided here, then sent to every shard
    sweep, weights, metrics,    sent to every shard; the answers are merged
    health, the list
    model calls                 421 with the shard's address: turns never pass through a front

The front owns the gate, with its holds in its own store. A verb takes effect at the front at once, then durably, then
at every shard that answers in time. Each other shard adds a line to `problems` and is retried until it answers.

In merged reports, counts are summed, and where shards disagree about a worker, the worst report wins. Reports about a
shard itself stay side by side, by shard number.
"""

import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from harness.errors import EngineUnavailable, MalformedRequest, ServerStopping, ShardUnavailable, StoreError
from harness.gateway.shards.directory import ShardDirectory
from harness.gateway.shards.front_sessions import FrontSessions
from harness.gateway.shards.shard import ENGINES_PATH, ShardCounts
from harness.gateway.shards.shard_client import VERB_S, ShardClient, ShardClients
from harness.machine.log import get_logger
from harness.server.gatekeeper import Gatekeeper
from harness.server.http.access import is_operator
from harness.server.http.connection import Callers
from harness.server.http.responses import ErrorAnswers, json_response
from harness.server.http.wire import parse_expected, read_body, read_fields
from harness.server.left_engines import LeftEngines
from harness.server.routes import GateCounts, ServerApi
from harness.server.settings import ServerSettings
from harness.server.telemetry.metrics import CONTENT_TYPE, ServerMetrics
from harness.sessions.weights.weight_update import LiveWeights, SweepReport, SweepRequest

_ENGINES_S = 8.0  # for engines to answer their shards
_OVER_S = 15.0  # for a sweep to finish after its time budget

_SUMS = tuple(
    name for name in SweepReport.__struct_fields__ if name not in ("version", "failures", "seconds", "is_running")
)
_SAMPLE = re.compile(rb"^([A-Za-z_:][\w:]*)(\{(.*)\})?( .*)$")

log = get_logger(__name__)


class Front(ServerApi):
    def __init__(
        self,
        links: ShardClients,
        gatekeeper: Gatekeeper,
        directory: ShardDirectory,
        metrics: ServerMetrics,
        settings: ServerSettings,
    ) -> None:
        super().__init__(gatekeeper, settings, ErrorAnswers(metrics, settings))
        self.callers = Callers()
        self.left_engines = LeftEngines(gatekeeper, self._continue_engines)
        self._links = links
        self._directory = directory
        self._metrics = metrics
        self._start = secrets.token_hex(8)

    def app(self) -> Starlette:
        sessions = FrontSessions(self._links, self.gatekeeper, self.callers, self.settings)
        return self.build_app(sessions, before=[], after=sessions.redirects())

    # Gate

    async def drain_sessions(self) -> Callable[[], int]:
        """See `ServerApi`. The gate state carries the drain to the shards."""
        before = self._sessions_closed
        self._directory.note_drain()
        self.gatekeeper.look_again()
        return lambda: self._sessions_closed - before

    async def count_sessions(self) -> GateCounts:
        """See `ServerApi`. Counts only shards that answer in time."""
        told = await self._links.ask(ShardClient.tell, VERB_S)
        counts = add_counts(told.answers.values())
        return GateCounts(
            counts.sessions,
            counts.sessions_open,
            counts.turns_in_flight,
            counts.turns_held,
            self.gatekeeper.held + counts.held,
            told.problems,
        )

    @property
    def released_elsewhere(self) -> int:
        return sum(link.released for link in self._links)

    @property
    def _sessions_closed(self) -> int:
        return sum(link.sessions_closed for link in self._links)

    async def _continue_engines(self) -> None:
        # One shard is enough, because all have the same engines. `some` raises if every shard fails.
        async def wake(link: ShardClient) -> None:
            (await link.ask("POST", ENGINES_PATH)).require()

        _ = (await self._links.ask(wake, _ENGINES_S)).some

    # Weight updates

    async def _start_sweep(self, request: Request) -> Response:
        asked = await read_fields(request, self.settings.limits, SweepRequest)
        share = msgspec.structs.replace(asked, concurrency=max(1, asked.concurrency // len(self._links)))
        body = msgspec.json.encode(share)
        refusals: list[Response] = []

        async def sweep(link: ShardClient) -> SweepReport:
            answer = await link.ask("POST", "/sessions/sweep", body)
            if answer.status == MalformedRequest.status:
                refusals.append(Response(answer.body, answer.status, media_type="application/json"))
            return answer.read(SweepReport)

        done = await self._links.ask(sweep, asked.budget_s + _OVER_S)
        if refusals:
            return refusals[0]
        return json_response(merge_sweeps(done.some, {ShardUnavailable.code: len(done.problems)}))

    async def _sweep_progress(self, request: Request) -> Response:
        async def look(link: ShardClient) -> SweepReport | None:
            return (await link.ask("GET", "/sessions/sweep")).read(SweepReport | None)  # type: ignore[arg-type]

        found = await self._links.ask(look, VERB_S)
        reports = [report for report in found.some if report is not None]
        return json_response(merge_sweeps(reports, {}) if reports else None)

    async def _weights(self, request: Request) -> Response:
        expected = msgspec.json.encode(parse_expected(await read_body(request, self.settings.limits)))
        asked = await self._links.fetch(LiveWeights, _ENGINES_S, "/sessions/weights", expected)
        return json_response(merge_weights(asked.some, asked.problems))

    # Operation

    async def _describe(self, request: Request) -> Response:
        said = (await self._links.fetch(dict[str, Any], VERB_S, "/sessions/server")).some[0]
        return json_response({**said, "start": self._start, "shards": [link.url for link in self._links]})

    async def _health(self, request: Request) -> Response:
        if not is_operator(request.headers, self.settings.admin_token):
            return json_response({"status": "alive"})
        also = HTTPStatus.SERVICE_UNAVAILABLE
        asked = await self._links.fetch(dict[str, Any], VERB_S, "/health", also=also)
        said = [{"shard": number, **answer} for number, answer in asked.answers.items()]
        troubles = (
            (ServerStopping.code, self.callers.is_stopping),
            (ShardUnavailable.code, bool(asked.problems)),
            (StoreError.code, any(each["status"] == StoreError.code for each in said)),
            (EngineUnavailable.code, any(each["status"] == EngineUnavailable.code for each in said)),
            ("engine_paused", self.left_engines.problem is not None),
        )
        others = (each["status"] for each in said if each["status"] != "ok")
        status = next((code for code, is_so in troubles if is_so), next(others, "ok"))
        body = {
            "status": status,
            "gate": str(self.gatekeeper.gate.state),
            "shards": said,
            "problems": asked.problems,
            "left_paused": self.left_engines.problem or "",
        }
        return json_response(body, HTTPStatus.OK if status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _render_metrics(self, request: Request) -> Response:
        async def ask(link: ShardClient) -> bytes:
            answer = await link.ask("GET", "/metrics")
            answer.require()
            return answer.body

        asked = await self._links.ask(ask, VERB_S)
        pages = {str(number): page for number, page in asked.answers.items()}
        return Response(merge_metrics({"front": self._metrics.render(), **pages}), media_type=CONTENT_TYPE)


def add_counts(counts: Iterable[ShardCounts]) -> ShardCounts:
    columns = list(zip(*map(msgspec.structs.astuple, counts), strict=True))
    return ShardCounts(*map(sum, columns))


def merge_sweeps(reports: Sequence[SweepReport], problems: Mapping[str, int]) -> SweepReport:
    """Merge sweeps; `problems` counts unanswered shards by error code."""
    sums = {name: sum(getattr(report, name) for report in reports) for name in _SUMS}
    failures = Counter({code: count for code, count in problems.items() if count})
    for report in reports:
        failures.update(report.failures)
    return SweepReport(
        version=max(report.version for report in reports),
        failures=dict(failures),
        seconds=max(report.seconds for report in reports),
        is_running=any(report.is_running for report in reports),
        **sums,
    )


def merge_weights(answers: Sequence[LiveWeights], problems: tuple[str, ...]) -> LiveWeights:
    """Merge worker versions: a worker is fenced if any shard fenced it."""
    fenced = {worker: version for answer in answers for worker, version in answer.fenced.items()}
    serving = {worker: version for answer in answers for worker, version in answer.serving.items()}
    serving = {worker: version for worker, version in serving.items() if worker not in fenced}
    return LiveWeights(answers[0].version, serving, fenced, problems)


def merge_metrics(pages: Mapping[str, bytes]) -> bytes:
    """Merge metrics pages, adding a `shard` label to each sample."""
    families: dict[bytes, list[bytes]] = {}
    heads: dict[bytes, list[bytes]] = {}
    for shard, page in pages.items():
        family = b""
        for line in page.splitlines():
            if line.startswith(b"# "):
                family = line.split(maxsplit=3)[2]
                if line not in heads.setdefault(family, []):
                    heads[family].append(line)
            elif sample := _SAMPLE.match(line):
                name, _, labels, value = sample.groups()
                own = b'shard="%s"' % shard.encode() + (b"," + labels if labels else b"")
                families.setdefault(family, []).append(b"%s{%s}%s" % (name, own, value))
    lines = (line for family in heads for line in (*heads[family], *families.get(family, ())))
    return b"".join(line + b"\n" for line in lines)
