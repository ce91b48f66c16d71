"""What engines say of themselves in `/metrics` is read as Prometheus reads it, and never guessed."""

from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engines.remote.metrics import Metrics
from harness.errors import EngineReplyInvalid
from harness.types import GenerationRequest, SamplingParams, as_ids
from tests.fake_engines.fake_server import serving
from tests.fake_engines.providers import fake_provider, make_fake, scripted_engine

KINDS = ("sglang", "vllm")
NAME = "vllm:generation_tokens_total"
COUNTED = {"sglang": "sglang:generation_tokens_total", "vllm": NAME}
STAMPS = st.sampled_from(["", " 1763856000000", "\t-1", ' 3 # {trace_id="a b"} 1.0 17'])
LABEL_VALUES = st.text(st.sampled_from('ab {}"\\,=# 1\u2028'), max_size=8)


def series(name: str, value: str, stamp: str = "", **labels: str) -> str:
    """A line of the page."""
    quoted = {key: each.replace("\\", "\\\\").replace('"', '\\"') for key, each in labels.items()}
    inside = ",".join(f'{key}="{each}"' for key, each in quoted.items())
    return f"{name}{{{inside}}} {value}{stamp}"


@given(st.lists(st.tuples(st.integers(0, 10**9), LABEL_VALUES, STAMPS), max_size=4), st.sampled_from(["NaN", "+Inf"]))
def test_a_total_is_the_sum_however_its_series_are_written(told: list[tuple[int, str, str]], other: str) -> None:
    """With labels of any text, and with a time behind the value; others of a similar name count nothing."""
    lines = [series(NAME, f"{value:e}" if value < 10**6 else str(value), stamp, x=x) for value, x, stamp in told]
    others = [f"# HELP {NAME} of all", f"{NAME}_created 17.5", f"{NAME}s 4", f"the_{NAME} 4", f"some_ratio {other}"]
    metrics = Metrics("\n".join([*others, *lines]), "it")

    assert metrics.total(NAME) == sum(value for value, _, _ in told)
    assert metrics.has(NAME) is bool(told)
    assert metrics.total("the_" + NAME) == 4


def test_a_series_is_the_same_at_another_time() -> None:
    """A page that stamps each value does not make its server a new one."""
    then, now = (Metrics(f"process_start_time_seconds 1.7e+09 {stamp}\n", "it") for stamp in (1, 2))

    assert then.fingerprint("process_start_time_seconds") == now.fingerprint("process_start_time_seconds") == "1.7e+09"


@pytest.mark.parametrize("written", [" NaN", " +Inf", " 1,5", "", '{a="b} 1'])
def test_what_is_no_number_is_none(written: str) -> None:
    """A sum without it would be one that nobody counted."""
    metrics = Metrics(f"{NAME}{written}\n{NAME} 3", "vllm at http://w")

    with pytest.raises(EngineReplyInvalid, match=f"vllm at http://w: expected a number for {NAME}"):
        metrics.total(NAME)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_that_stamps_its_counters_is_counted(kind: str) -> None:
    """Between two looks the same process has sampled what it was asked for."""
    fake = make_fake(kind, scripted_engine())
    async with serving(fake, notices_disconnects=False), fake_provider(fake) as provider:
        clock = iter(range(10**6))
        fake.write_series = lambda line: f"{line} {next(clock)}"
        before = await provider.count_sampled()
        request = GenerationRequest(as_ids([4, 5]), SamplingParams(max_new_tokens=6), uuid4().hex)
        result = await provider.generate(request)
        after = await provider.count_sampled()

    assert (after.start, after.tokens - before.tokens) == (before.start, result.output_ids.size)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_whose_counter_is_no_number_is_not_counted(kind: str) -> None:
    """The error is one of the engine, so a run says why it has no number and continues."""
    fake = make_fake(kind, scripted_engine())
    async with serving(fake, notices_disconnects=False), fake_provider(fake) as provider:
        fake.write_series = lambda line: f"{line.rpartition(' ')[0]} NaN" if line.startswith(COUNTED[kind]) else line
        with pytest.raises(EngineReplyInvalid, match="NaN"):
            await provider.count_sampled()
        assert (await provider.health()).ready
