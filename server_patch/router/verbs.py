"""Translate a control verb of SGLang to calls at a worker, in order. Pure.

An SGLang worker gets a verb byte for byte. vLLM refuses `/update_weights_from_distributed` and
`/update_weights_from_tensor`, and has no lock around a reload: fan-out keeps such a worker paused.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

Body = dict[str, Any]

_UNSETTLED = "updating-"
"""Label prefix of half-updated weights; session servers know it."""


class Engine(StrEnum):
    SGLANG = "sglang"
    VLLM = "vllm"


class VerbError(ValueError):
    """A verb that the engine does not support."""


@dataclass(frozen=True, slots=True)
class VerbResult:
    url: str
    engine: str
    """`sglang`, `vllm`, or "" if never heard from."""
    succeeded: bool
    status: int | None
    body: Any
    seconds: float
    error: str


Tell = Callable[[], Awaitable[Sequence[VerbResult]]]
"""Function that has every worker carry out a verb."""


@dataclass(frozen=True, slots=True)
class VerbOrder:
    """A control verb as a client sent it."""

    verb: str
    """Path, `/pause_generation`."""
    method: str
    query: str
    """Raw query without the question mark."""
    body: bytes

    @property
    def fields(self) -> Body:
        """Decoded body. Raises `VerbError` unless it is a JSON object."""
        try:
            body = json.loads(self.body) if self.body else {}
        except (ValueError, RecursionError) as error:
            raise VerbError(f"{self.verb}: the body is not JSON ({error})") from error
        if not isinstance(body, dict):
            raise VerbError(f"{self.verb}: expected a JSON object, got {type(body).__name__}")
        return body


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    target: str
    body: bytes = b""
    or_else: str = ""
    """Path to try if the first is missing."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Calls of a verb, up to the first failure."""

    calls: tuple[Call, ...]
    while_paused: bool = False
    """True if the worker must not sample meanwhile; a failure leaves it paused."""


@dataclass(frozen=True, slots=True)
class Verb:
    methods: frozenset[str]
    deadline_s: float
    on_vllm: Callable[[Body], Plan]


def plan(order: VerbOrder, engine: Engine) -> Plan:
    """Plan the calls of `order`. Raises `VerbError`."""
    if engine is Engine.SGLANG:
        target = f"{order.verb}?{order.query}" if order.query else order.verb
        return Plan((Call(order.method, target, order.body),))
    return VERBS[order.verb].on_vllm(order.fields)


def _post(target: str, body: Body | None = None, *, or_else: str = "") -> Call:
    return Call("POST", target, json.dumps(body or {}).encode(), or_else)


def _flag(body: Body, name: str, *, default: bool = False) -> bool:
    said = body.get(name, default)
    if not isinstance(said, bool):
        raise VerbError(f"expected {name} to be true or false, got {said!r}")
    return said


def _abort(body: Body) -> Plan:
    if _flag(body, "abort_all"):
        return Plan((_post("/abort_requests"),))
    # vLLM aborts by prefixed ids only, and reports every id as aborted. The prefix depends on the request's endpoint:
    # all of them are sent.
    named = body.get("rid") or []
    rids = [named] if isinstance(named, str) else named
    if not isinstance(rids, list):
        raise VerbError(f"/abort_request: expected rid to be an id or a list of ids, got {named!r}")
    names = [name for rid in rids for name in _names_of(str(rid))]
    # Without ids vLLM would abort everything, where SGLang aborts nothing.
    return Plan((_post("/abort_requests", {"request_ids": names}, or_else=_ABORT_ANYWAY),) if names else ())


def _names_of(rid: str) -> list[str]:
    return [rid, f"generate-tokens-{rid}", f"chatcmpl-{rid}", f"cmpl-{rid}-0"]


def _pause(body: Body) -> Plan:
    mode = body.get("mode") or "abort"
    if mode not in tuple(_PAUSES):  # a client may send what cannot be a key
        raise VerbError(f"/pause_generation: expected mode abort, retract or in_place, got {mode!r}")
    return Plan((_post(_PAUSES[mode]),))


def _update_weights(body: Body) -> Plan:
    path, version = body.get("model_path"), body.get("weight_version")
    if not isinstance(path, str):
        raise VerbError(f"/update_weights_from_disk: expected model_path to be a path, got {path!r}")
    calls = []
    if _flag(body, "abort_all_requests"):
        calls.append(_post("/abort_requests"))
    if version is not None:
        # An update that breaks off from here on leaves a label that is no version, never a wrong one.
        calls.append(_labeled(f"{_UNSETTLED}{version}"))
    calls.append(_post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}))
    if _flag(body, "flush_cache", default=True):
        calls.append(_post("/reset_prefix_cache"))
    if version is not None:
        calls.append(_labeled(version))
    return Plan(tuple(calls), while_paused=True)


def _receive_weights(_body: Body) -> Plan:
    raise VerbError("a vLLM worker takes weights from a folder only: /update_weights_from_disk")


def _labeled(version: object) -> Call:
    return _post("/update_weight_version", {"new_version": version})


_ABORT_ANYWAY = "/inference/v1/abort_requests"
"""Path that exists without dev mode, besides the token endpoint."""

_PAUSES = {
    "abort": "/pause?mode=abort&clear_cache=true",
    "retract": "/pause?mode=keep&clear_cache=true",
    "in_place": "/pause?mode=keep&clear_cache=false",
}

_POST = frozenset({"POST"})
_CONTROL_S = 60.0
_WEIGHTS_S = 600.0

VERBS: Mapping[str, Verb] = MappingProxyType(
    {
        "/abort_request": Verb(_POST, _CONTROL_S, _abort),
        "/pause_generation": Verb(_POST, _CONTROL_S, _pause),
        "/continue_generation": Verb(_POST, _CONTROL_S, lambda _: Plan((_post("/resume"),))),
        "/flush_cache": Verb(frozenset({"GET", "POST"}), _CONTROL_S, lambda _: Plan((_post("/reset_prefix_cache"),))),
        "/update_weights_from_disk": Verb(_POST, _WEIGHTS_S, _update_weights),
        "/update_weights_from_distributed": Verb(_POST, _WEIGHTS_S, _receive_weights),
        "/update_weights_from_tensor": Verb(_POST, _WEIGHTS_S, _receive_weights),
        "/update_weight_version": Verb(_POST, _CONTROL_S, lambda body: Plan((_labeled(body.get("new_version")),))),
    }
)
"""Verbs for every worker, by path."""
