"""Token counters in the `/metrics` of engine servers.

They count all clients. SGLang counts a request when it has ended, and never one aborted while queued or retracted,
though it returns its tokens; vLLM counts every token at once. Requests per route show whether other clients use the
server.
"""

import math
import re
from collections.abc import Container, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple

from harness.engines.base import EngineCount
from harness.engines.remote.http_client import EngineClient, HttpCall
from harness.errors import EngineRejected, EngineReplyInvalid

_DEADLINE_S = 10.0
_LABELS = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_REST = re.compile(r'(?![\w:])\s*(?:\{((?:[^"{}]|"(?:[^"\\]|\\.)*")*)\})?\s*(\S*)')
"""Labels and value after a name; a timestamp or an exemplar may follow."""

_SAMPLING_ROUTES = (
    *("/generate", "/inference/v1/generate", "/invocations", "/api/chat", "/api/generate"),
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
)


class _Series(NamedTuple):
    labels: Mapping[str, str]
    value: str


class Metrics:
    """Prometheus exposition of `source`, the server's name in errors."""

    def __init__(self, text: str, source: str) -> None:
        self._lines = text.split("\n")  # not `splitlines`: a label may hold other line ends
        self._source = source

    def total(self, name: str, **labels: Container[str]) -> int:
        """Return the sum over series of `name` with matching labels. Raises `EngineReplyInvalid` for a non-number."""
        return round(
            sum(
                self._number(name, each.value)
                for each in self._series(name)
                if all(each.labels.get(key, "") in labels[key] for key in labels)
            )
        )

    def has(self, name: str) -> bool:
        return bool(self._series(name))

    def label_values(self, name: str, label: str) -> list[str]:
        """Return the distinct values of `label` in the series of `name`."""
        return list(dict.fromkeys(each.labels[label] for each in self._series(name) if label in each.labels))

    def fingerprint(self, name: str) -> str:
        """Return the values of all series of `name` as text."""
        return " ".join(each.value for each in self._series(name))

    def _series(self, name: str) -> list[_Series]:
        return [
            _Series(dict(_LABELS.findall(found[1] or "")), found[2])
            for line in self._lines
            if line.startswith(name) and (found := _REST.match(line, len(name)))
        ]

    def _number(self, name: str, value: str) -> float:
        with suppress(ValueError):
            if math.isfinite(number := float(value)):
                return number
        raise EngineReplyInvalid(f"{self._source}: expected a number for {name} in /metrics, got {value!r}")


async def count_sglang(client: EngineClient) -> EngineCount:
    """Read the counters of a SGLang server. Raises `EngineError`."""
    metrics = await _read(client, "--enable-metrics")
    # SGLang exports no process start time; the durations of its startup phases never repeat.
    started = metrics.fingerprint("sglang:startup_time_seconds") or metrics.fingerprint("process_start_time_seconds")
    asked = metrics.total("sglang:http_requests_total", method={"POST", "PUT"}, endpoint=_SAMPLING_ROUTES)
    return EngineCount(
        client.name,
        start=started and f"{started} {client.since}",
        tokens=metrics.total("sglang:generation_tokens_total"),  # without a series before the first request has ended
        requests=asked,
        own_requests=client.generations_sent,
        uncounted=asked - metrics.total("sglang:num_requests_total"),
    )


async def count_vllm(client: EngineClient, scorings_answered: int, scorings_sent: int) -> EngineCount:
    """Read the counters of a vLLM server. Raises `EngineError`."""
    metrics = await _read(client, "its statistics on (no --disable-log-stats)")
    if not metrics.has("vllm:generation_tokens_total"):
        raise EngineRejected(f"{client.name} does not count its tokens: start it without --disable-log-stats")
    started = metrics.fingerprint("process_start_time_seconds")
    return EngineCount(
        client.name,
        start=started and f"{started} {client.since}",
        tokens=metrics.total("vllm:generation_tokens_total"),
        # Each scoring samples a token.
        scored=scorings_answered,
        scored_unheard=scorings_sent - scorings_answered,
        requests=metrics.total("http_requests_total", method={"POST"}, handler=_SAMPLING_ROUTES, status={"2xx"}),
        own_requests=client.generations_sent,
    )


async def _read(client: EngineClient, setting: str) -> Metrics:
    answer = await client.ask(HttpCall("GET", "/metrics", _DEADLINE_S))
    if answer.status != HTTPStatus.OK:
        raise EngineRejected(f"{client.name} answers /metrics with {answer.status}: start it with {setting}")
    return Metrics(answer.content.decode("utf-8", errors="replace"), client.name)
