"""What a control verb is on a worker: SGLang gets it as it came, vLLM gets it translated."""

import json

import pytest

from server_patch.router.verbs import VERBS, Call, Engine, VerbError, VerbOrder, plan


def order(verb: str, body: object = None, query: str = "") -> VerbOrder:
    """The verb as a client sends it."""
    return VerbOrder(verb, "POST", query, b"" if body is None else json.dumps(body).encode())


def on_vllm(verb: str, body: object = None) -> list[tuple[str, dict]]:
    """The calls on a vLLM worker: where, and what."""
    return [(call.target, json.loads(call.body)) for call in plan(order(verb, body), Engine.VLLM).calls]


@pytest.mark.parametrize("verb", VERBS)
def test_sglang_gets_every_verb_byte_for_byte(verb: str) -> None:
    """Fields that this version does not know travel too."""
    sent = VerbOrder(verb, "POST", "timeout=3&x=%20", b'{"unknown":  1}')

    assert plan(sent, Engine.SGLANG).calls == (Call("POST", f"{verb}?timeout=3&x=%20", b'{"unknown":  1}'),)


@pytest.mark.parametrize(
    ("mode", "target"),
    [
        (None, "/pause?mode=abort&clear_cache=true"),
        ("abort", "/pause?mode=abort&clear_cache=true"),
        ("retract", "/pause?mode=keep&clear_cache=true"),
        ("in_place", "/pause?mode=keep&clear_cache=false"),
    ],
)
def test_pauses_mean_the_same_on_vllm(mode: str | None, target: str) -> None:
    """A retracted request computes its cache anew, one paused in place keeps it."""
    assert on_vllm("/pause_generation", {} if mode is None else {"mode": mode}) == [(target, {})]


def test_an_abort_names_a_request_in_every_way_vllm_may_know_it() -> None:
    """The prefix depends on the endpoint that the request came in by; any other name is ignored without a word."""
    [(target, body)] = on_vllm("/abort_request", {"rid": "r1"})

    assert target == "/abort_requests"
    assert body == {"request_ids": ["r1", "generate-tokens-r1", "chatcmpl-r1", "cmpl-r1-0"]}


def test_an_abort_of_nothing_aborts_nothing() -> None:
    """SGLang ignores it; vLLM without ids would abort everything."""
    assert on_vllm("/abort_request", {}) == []
    assert on_vllm("/abort_request", {"abort_all": True}) == [("/abort_requests", {})]


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("/abort_request", {"abort_all": "false"}),
        ("/update_weights_from_disk", {"model_path": "/w/2", "abort_all_requests": "false"}),
        ("/update_weights_from_disk", {"model_path": "/w/2", "flush_cache": "no"}),
    ],
)
def test_a_text_is_no_yes_and_no_no(verb: str, body: dict[str, object]) -> None:
    with pytest.raises(VerbError, match="to be true or false"):
        plan(order(verb, body), Engine.VLLM)


def test_new_weights_are_loaded_flushed_and_named_while_paused() -> None:
    """A vLLM server has no lock around a reload, keeps a cache of the old weights, and takes the label apart."""
    body = {"model_path": "/w/2", "weight_version": "2"}

    assert plan(order("/update_weights_from_disk", body), Engine.VLLM).while_paused
    assert on_vllm("/update_weights_from_disk", body) == [
        ("/update_weight_version", {"new_version": "updating-2"}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/w/2"}}),
        ("/reset_prefix_cache", {}),
        ("/update_weight_version", {"new_version": "2"}),
    ]


@pytest.mark.parametrize(
    ("verb", "body", "message"),
    [
        ("/pause_generation", {"mode": "nap"}, "expected mode abort, retract or in_place, got 'nap'"),
        ("/pause_generation", {"mode": ["abort"]}, r"expected mode abort, retract or in_place, got \['abort'\]"),
        ("/pause_generation", [1], "expected a JSON object, got list"),
        ("/abort_request", {"rid": 5}, "expected rid to be an id or a list of ids, got 5"),
        ("/update_weights_from_disk", {}, "expected model_path to be a path, got None"),
        ("/update_weights_from_tensor", {}, "takes weights from a folder only: /update_weights_from_disk"),
    ],
)
def test_what_vllm_cannot_be_told_is_refused_by_name(verb: str, body: object, message: str) -> None:
    """A worker that was told something else than was meant would be worse than one that was not told."""
    with pytest.raises(VerbError, match=message):
        plan(order(verb, body), Engine.VLLM)
