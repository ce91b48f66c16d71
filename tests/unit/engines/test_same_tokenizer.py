"""A server with another tokenizer is found when it is entered, before it could sample ids that mean something else."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from harness.engines.connect import open_engine
from harness.errors import TokenizerMismatch
from harness.tokens.tokenizer import Tokenizer
from tests.fake_engines.fake_server import Fault, serving
from tests.fake_engines.providers import FAKE_KINDS, make_fake, scripted_engine, toy_tokenizer
from tests.toy_model import write_toy_model

KINDS = pytest.mark.parametrize("kind", FAKE_KINDS)


def family(kind: str) -> str:
    """How `--engine` calls a fake of `kind`."""
    return "sglang" if "sglang" in kind else "vllm"


def with_marker(directory: Path) -> Tokenizer:
    """The toy tokenizer with one marker more."""
    path = write_toy_model(directory) / "tokenizer.json"
    raw = RawTokenizer.from_file(str(path))
    raw.add_special_tokens([AddedToken("<|another|>", special=True)])
    path.write_text(json.dumps(json.loads(raw.to_str())), encoding="utf-8")
    return Tokenizer.load(directory)


@KINDS
async def test_the_same_tokenizer_is_let_in(kind):
    fake = make_fake(kind, scripted_engine())
    async with (
        serving(fake, notices_disconnects=True) as url,
        open_engine(f"{family(kind)}={url}", tokenizer=toy_tokenizer()) as engine,
    ):
        assert "/tokenize" in fake.posted
        assert engine.capabilities.vocab_size == toy_tokenizer().vocab_size


@KINDS
async def test_another_tokenizer_is_one_error(kind, tmp_path):
    """It names the text, what the server makes of it and what we do; nothing was generated."""
    fake = make_fake(kind, scripted_engine())
    ours = with_marker(tmp_path / "toy")
    async with serving(fake, notices_disconnects=True) as url:
        with pytest.raises(TokenizerMismatch) as caught:
            async with open_engine(f"{family(kind)}={url}", tokenizer=ours):
                pytest.fail("it was let in")

    assert "<|another|>" in str(caught.value)
    assert f"there and [{ours.encode('<|another|>')[0]}" in str(caught.value)
    assert "--tokenizer" in str(caught.value)
    assert not fake.sampled


@KINDS
async def test_one_of_a_pool_with_another_tokenizer_is_one_error(kind, tmp_path):
    """The others do not help: any turn may be placed there."""
    fakes = [make_fake(kind, scripted_engine()) for _ in range(2)]
    async with (
        serving(fakes[0], notices_disconnects=True) as first,
        serving(fakes[1], notices_disconnects=True) as second,
    ):
        engine = open_engine(f"{family(kind)}={first},{second}", tokenizer=with_marker(tmp_path / "toy"))
        with pytest.raises(TokenizerMismatch):
            async with engine:
                pytest.fail("it was let in")


@KINDS
async def test_a_server_without_the_route_is_taken_as_it_is(kind, tmp_path):
    """One that was started without a tokenizer, say: nobody can compare."""
    fake = make_fake(kind, scripted_engine())
    fake.faults["/tokenize"] = [Fault.REFUSED]
    async with (
        serving(fake, notices_disconnects=True) as url,
        open_engine(f"{family(kind)}={url}", tokenizer=with_marker(tmp_path / "toy")) as engine,
    ):
        assert (await engine.health()).ready
