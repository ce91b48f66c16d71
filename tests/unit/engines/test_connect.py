"""Engines are named on one line; what cannot work is refused before anything starts."""

import pytest

from harness.engines.connect import open_engine
from harness.engines.pool.pool import EnginePool
from harness.engines.remote.sglang import SGLangTokenProvider
from harness.engines.remote.vllm import VLLMTokenProvider
from harness.errors import EngineUnavailable, ScenarioError
from tests.fake_engines.providers import toy_tokenizer


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sglang=http://127.0.0.1:1", SGLangTokenProvider),
        ("vllm=https://gpu:8000/", VLLMTokenProvider),
        ("sglang=http://127.0.0.1:1,http://127.0.0.1:2", EnginePool),
        ("vllm=http://127.0.0.1:1, http://127.0.0.1:2", EnginePool),
    ],
)
def test_a_url_is_a_worker_and_several_are_a_pool(name: str, kind: type):
    assert type(open_engine(name, tokenizer=toy_tokenizer())) is kind


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tgi=http://127.0.0.1:1", "no engine 'tgi=http://127.0.0.1:1' in this version; expected one of local"),
        ("local=http://127.0.0.1:1", "no engine"),
        ("sglang", "needs the address of a server"),
        ("vllm=,", "needs the address of a server"),
        ("vllm=127.0.0.1:8000", "expected an address such as"),
        ("sglang=http://127.0.0.1:1,ftp://x", "got 'ftp://x'"),
        ("local", "needs weights"),
    ],
)
def test_a_name_that_cannot_work_is_refused(name: str, message: str):
    with pytest.raises(ScenarioError, match=message):
        open_engine(name, tokenizer=toy_tokenizer())


@pytest.mark.parametrize("name", ["scripted", "sglang=http://127.0.0.1:1", "vllm=http://127.0.0.1:1"])
def test_ids_need_a_tokenizer(name: str):
    """Servers are given ids, so somebody has to know the vocabulary."""
    with pytest.raises(ScenarioError, match="needs a tokenizer"):
        open_engine(name)


async def test_a_pool_of_absent_servers_says_which_one():
    pool = open_engine("vllm=http://127.0.0.1:1", tokenizer=toy_tokenizer())
    with pytest.raises(EngineUnavailable, match=r"vllm at http://127.0.0.1:1 cannot be reached"):
        async with pool:
            pass
