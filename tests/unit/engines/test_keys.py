"""Keys of engine servers: by option, by environment, by worker; shown by nothing."""

from contextlib import AsyncExitStack

import pytest

from harness.engines.base import TokenProvider
from harness.engines.connect import EngineName, open_engine
from harness.engines.examine.doctor import diagnose
from harness.engines.remote.address import ENGINE_KEY
from harness.errors import EngineRejected, ScenarioError
from harness.rollouts.control.engines import EngineServer, as_workers
from harness.rollouts.control.weights import WeightUpdater
from harness.types import GenerationRequest, SamplingParams, as_ids
from tests.fake_engines.fake_server import FakeServer, serving
from tests.fake_engines.fake_sglang import FakeSGLang
from tests.fake_engines.fake_vllm import FakeVLLM
from tests.fake_engines.providers import scripted_engine, toy_tokenizer
from tests.logged import capture_logs

SECRET = "s3cret-of-the-engine"
FAKES = {"sglang": FakeSGLang, "vllm": FakeVLLM}
ASKED = SamplingParams(max_new_tokens=2)


async def locked(stack: AsyncExitStack, kind: str, key: str = SECRET) -> FakeServer:
    """An engine server that answers nobody without `key`."""
    fake: FakeServer = FAKES[kind](scripted_engine())
    fake.api_key = key
    await stack.enter_async_context(fake.engine)
    await stack.enter_async_context(serving(fake, notices_disconnects=kind == "vllm"))
    return fake


async def sample(provider: TokenProvider, sessions: int = 1) -> None:
    """Sample for so many sessions, which a pool spreads over its workers."""
    async with provider:
        for index in range(sessions):
            await provider.generate(
                GenerationRequest(as_ids([5, 6, 7]), ASKED, request_id=f"request-{index}", session_id=str(index))
            )


@pytest.mark.parametrize("kind", FAKES)
async def test_a_key_is_sent_with_every_request(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the option, from the environment, and from the variable that an address names, which goes first."""
    async with AsyncExitStack() as stack:
        fake = await locked(stack, kind)
        await sample(open_engine(f"{kind}={fake.url}", tokenizer=toy_tokenizer(), engine_key=SECRET))
        monkeypatch.setenv(ENGINE_KEY, SECRET)
        await sample(open_engine(f"{kind}={fake.url}", tokenizer=toy_tokenizer()))
        monkeypatch.setenv(ENGINE_KEY, "of another engine")
        monkeypatch.setenv("WORKER_A", SECRET)
        await sample(open_engine(f"{kind}={fake.url}#key=WORKER_A", tokenizer=toy_tokenizer(), engine_key="of another"))

    assert set(fake.keys) == {f"Bearer {SECRET}"}


async def test_each_worker_of_a_pool_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key goes to its own worker and to no other."""
    monkeypatch.setenv("KEY_A", "key of a")
    monkeypatch.setenv(ENGINE_KEY, "key of all")
    async with AsyncExitStack() as stack:
        a, b = await locked(stack, "sglang", "key of a"), await locked(stack, "sglang", "key of all")
        await sample(open_engine(f"sglang={a.url}#key=KEY_A,{b.url}", tokenizer=toy_tokenizer()), sessions=4)

    assert (set(a.keys), set(b.keys)) == ({"Bearer key of a"}, {"Bearer key of all"})


@pytest.mark.parametrize("kind", FAKES)
async def test_whoever_controls_engines_by_address_has_keys_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKER_A", SECRET)
    async with AsyncExitStack() as stack:
        fake = await locked(stack, kind)
        named = [f"{kind}={fake.url}#key=WORKER_A", f"{fake.url}#key=WORKER_A"]
        for worker in (*as_workers(named), EngineServer(fake.url, api_key=SECRET)):
            await worker.abort_all(deadline_s=5)
        async with WeightUpdater(named[:1], []).update(1) as running:
            pass
        diagnosis = await diagnose(fake.url, api_key=SECRET)

    assert set(fake.keys) == {f"Bearer {SECRET}"}
    assert SECRET not in f"{running.report!r} {diagnosis!r}"


async def test_a_wrong_key_says_where_keys_come_from_and_nothing_shows_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the error nor the log nor a repr."""
    monkeypatch.setenv(ENGINE_KEY, "wr0ng-one")
    async with AsyncExitStack() as stack:
        fake = await locked(stack, "sglang")
        provider = open_engine(f"sglang={fake.url}", tokenizer=toy_tokenizer())
        with capture_logs() as logs, pytest.raises(EngineRejected, match="HARNESS_ENGINE_KEY") as raised:
            await stack.enter_async_context(provider)

    shown = f"{raised.value.message} {logs} {provider!r} {EngineServer(fake.url, api_key='wr0ng-one')!r}"
    assert "wr0ng-one" not in shown


@pytest.mark.parametrize("before", ["sglang=", "vllm=http://ok:1,"])
@pytest.mark.parametrize(
    "url", ["http://user:s3cret@h:1", "http://s3cret@h:1", "http://:s3cret@h:1/path", "user:s3cret@h:1", "s3cret@h:1"]
)
def test_an_address_with_a_secret_in_it_is_refused_and_not_shown(before: str, url: str) -> None:
    with pytest.raises(ScenarioError, match="HARNESS_ENGINE_KEY") as raised:
        EngineName.parse(before + url)

    assert "s3cret" not in raised.value.message


@pytest.mark.parametrize("name", ["magic=http://user:s3cret@h:1", "scripted=http://s3cret@h"])
def test_an_engine_that_nobody_knows_is_not_shown_with_its_secret(name: str) -> None:
    with pytest.raises(ScenarioError) as raised:
        EngineName.parse(name)

    assert "s3cret" not in raised.value.message


async def test_whoever_is_given_an_address_refuses_a_secret_in_it() -> None:
    """Whether or not it is the address of an engine that samples."""
    with pytest.raises(ScenarioError, match="without a user or a secret") as raised:
        await EngineServer("http://user:s3cret@127.0.0.1:1").abort_all(deadline_s=1)

    assert "s3cret" not in raised.value.message


@pytest.mark.parametrize(("fragment", "words"), [("key=NOT_SET_ANYWHERE", "NOT_SET_ANYWHERE"), ("x=y", "#key=")])
def test_a_key_that_is_not_there_is_said(fragment: str, words: str) -> None:
    with pytest.raises(ScenarioError, match=words):
        open_engine(f"sglang=http://h:1#{fragment}", tokenizer=toy_tokenizer())
