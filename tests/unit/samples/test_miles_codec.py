"""The blob that miles reads: its layout byte by byte, and samples that are too long."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.errors import MalformedRequest
from harness.samples.miles_codec import cut_sample, encode_for_miles, require_experts
from harness.token_rows import SampleRows
from harness.types import Json, Sample, SampleStatus, as_ids, as_logprobs
from tests.builders import toy_tokenizer, user
from tests.session_servers.served import says, serving, session_on
from tests.session_servers.true_rows import rows_of

DTYPES = {"I64": np.int64, "U8": np.uint8, "F64": np.float64, "I32": np.int32}


def read(blob: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a safetensors file, and the JSON in `_samples_meta`."""
    length = int.from_bytes(blob[:8], "little")
    header, data = json.loads(blob[8 : 8 + length]), blob[8 + length :]
    tensors, expected = {}, 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        assert begin == expected, "the format allows no holes"
        expected = end
        tensors[name] = np.frombuffer(data[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    assert (expected, length % 8) == (len(data), 0)
    return tensors, json.loads(tensors.pop("_samples_meta").tobytes())


def sample() -> Sample:
    """Three tokens of prompt, two sampled, two of context, two sampled."""
    versions = as_ids([0, 0, -1, -1, 1, 1])
    logprobs = as_logprobs([-0.1, -0.2, 0, 0, -0.3, -0.4])
    mask = (versions >= 0).astype(np.uint8)
    return Sample(as_ids(range(9)), 6, mask, logprobs, SampleStatus.COMPLETED, ("0", "1"), versions, logprobs, versions)


@pytest.mark.parametrize(("most", "length"), [(None, 6), (9, 6), (8, 5), (7, 2), (5, 2), (4, 1)])
def test_a_sample_is_cut_behind_a_sampled_token(most: int | None, length: int) -> None:
    """Context at the end of a sample would be trained by nobody; a cut sample is TRUNCATED."""
    cut = cut_sample(sample(), most)
    assert cut is not None
    columns = (
        cut.loss_mask,
        cut.rollout_log_probs,
        cut.behavior_versions,
        cut.proximal_logprobs,
        cut.proximal_versions,
    )
    assert {column.size for column in columns} == {length} == {cut.response_length}
    assert cut.tokens.tolist() == list(range(3 + length))
    assert cut.status is (SampleStatus.COMPLETED if length == 6 else SampleStatus.TRUNCATED)


@pytest.mark.parametrize("most", [3, 2])
def test_a_prompt_that_fills_everything_is_no_sample(most: int) -> None:
    assert cut_sample(sample(), most) is None


async def test_miles_collects_a_session() -> None:
    """The route: the session's sample, column by column, with what the agent returned."""
    async with session_on(*says("one", "two")) as (client, session):
        first = await client.say(session, [user("hi")])
        await client.say(session, [user("hi"), first, user("and?")])
        [expected] = await client.samples(session)
        body = {"max_seq_len": None, "metadata": {"reward": 0.5, "note": "ü"}}
        answer = await client.http.post(f"/sessions/{session.session_id}/samples", json=body)
        cut = await client.http.post(f"/sessions/{session.session_id}/samples", json={"max_seq_len": 3})
        unknown = await client.http.post(f"/sessions/{'0' * 32}/samples")
        refused = await client.http.post(f"/sessions/{session.session_id}/samples", json={"max_seq_len": 0})

    tensors, meta = read(answer.content)
    [described] = meta["samples"]
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/octet-stream")
    assert tensors["tokens.0"].tolist() == expected["tokens"]
    assert tensors["loss_mask.0"].tolist() == expected["loss_mask"]
    assert tensors["rollout_log_probs.0"].tolist() == expected["rollout_log_probs"]
    assert [tensors[f"{name}.0"].dtype.name for name in ("tokens", "loss_mask", "rollout_log_probs")] == [
        *("int64", "uint8", "float64")
    ]
    length = expected["response_length"]
    assert described["response"] == toy_tokenizer().decode(expected["tokens"][-length:])
    assert (described["response_length"], described["status"], described["reward"]) == (length, "completed", 0.5)
    assert (described["metadata"]["note"], described["metadata"]["harness"]["turns"]) == ("ü", [0, 1])
    assert described["nulls"] == ["rollout_routed_experts", "rollout_indexer_topk"]
    assert (meta["session_metadata"], meta["empty_reason"]) == ({}, None)
    assert read(cut.content)[1] == {"samples": [], "session_metadata": {}, "empty_reason": "all_truncated"}
    assert read(unknown.content)[1]["empty_reason"] == "no_records"
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_seq_len")


async def test_miles_gets_one_sample_unless_it_says_what_the_agent_returned() -> None:
    """Its first version states no metadata and takes one: that with the most tokens to train, whole."""
    async with session_on(*says("one", "two", "three")) as (client, session):
        system = {"role": "system", "content": "Be brief."}
        first = await client.say(session, [system, user("hi")])
        await client.say(session, [system, user("hi"), first, user("and?")])
        await client.say(session, [system, user("hi"), first, user("or?")])
        expected = await client.samples(session)
        url = f"/sessions/{session.session_id}/samples"
        bodies: list[Json] = [{"max_seq_len": None}, {"max_seq_len": None, "metadata": {}}]
        one, both = [read((await client.http.post(url, json=body)).content) for body in bodies]

    masks = [each["loss_mask"] for each in expected]
    assert [both[0][f"loss_mask.{number}"].tolist() for number in range(2)] == masks
    [described] = one[1]["samples"]
    spans = described["metadata"]["harness"]["spans"]
    assert (len(spans), one[0]["loss_mask.0"].sum()) == (2, sum(end - start for start, end in spans))


def test_the_librarys_own_reader_takes_it() -> None:
    """Where the library is installed: what miles has for reading it."""
    library = pytest.importorskip("safetensors.numpy")
    blob = encode_for_miles([replace(sample(), metadata={"turns": []})] * 2, [], toy_tokenizer().decode)
    tensors = library.load(blob)
    assert tensors["tokens.1"].tolist() == list(range(9))
    assert tensors["rollout_log_probs.0"].dtype == np.float64
    assert tensors["loss_mask.1"].tolist() == [1, 1, 0, 0, 1, 1]


async def test_miles_gets_the_experts_of_all_tokens_but_the_last() -> None:
    """As int32, cut with the sample."""
    async with serving(*says("a", "b")) as client:
        session = await client.create(record=["routed_experts"])
        first = await client.say(session, [user("one")])
        await client.say(session, [user("one"), first, user("two")])
        [ours] = await client.samples(session)
        path = f"/sessions/{session.session_id}/samples"
        whole = await client.http.post(path, json={})
        cut = await client.http.post(path, json={"max_seq_len": len(ours["tokens"]) - 1})

    tensors, meta = read(whole.content)
    rows = rows_of(ours).values
    assert tensors["rollout_routed_experts.0"].dtype == np.int32
    assert np.array_equal(tensors["rollout_routed_experts.0"], rows[:-1])
    assert meta["samples"][0]["nulls"] == ["rollout_indexer_topk"]
    shorter, _ = read(cut.content)
    size = shorter["tokens.0"].size
    assert np.array_equal(shorter["rollout_routed_experts.0"], rows[: size - 1])


def test_miles_gets_no_sample_with_missing_experts() -> None:
    """It would take them for padding, and route those tokens anywhere."""
    states = np.asarray([1, 1, 2, 1, 1, 1, 1, 1, 0], np.uint8)
    broken = replace(sample(), routed_experts=SampleRows(np.zeros((9, 1, 2), np.uint8), states))

    with pytest.raises(MalformedRequest, match="not_returned"):
        require_experts(broken, np.int32)
