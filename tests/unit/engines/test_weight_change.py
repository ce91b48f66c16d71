"""An update of one server's weights, broken off at each of its steps: no token gets the version of other weights."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest

from harness.engines.base import LogprobScale, PauseMode
from harness.engines.remote.sglang import SGLangTokenProvider
from harness.engines.remote.vllm import VLLMTokenProvider
from harness.engines.scripted import ScriptStep
from harness.errors import EngineError, WeightsUnsettled
from harness.types import GenerationRequest, GenerationResult, SamplingParams, as_ids
from tests.fake_engines.fake_server import UNFIT_WEIGHTS, FakeServer, Fault, serving
from tests.fake_engines.providers import fake_provider, make_fake, scripted_engine, toy_tokenizer
from tests.fake_engines.update_steps import STEPS
from tests.session_servers.served import eventually

PROMPT = as_ids(toy_tokenizer().encode_plain("Hi."))
GOOD_UPDATES = 3
KINDS = ("sglang", "vllm")
Provider = SGLangTokenProvider | VLLMTokenProvider


@dataclass
class Server:
    """A fake server and its provider, and the weights that belong to each label."""

    fake: FakeServer
    provider: Provider
    weights: dict[str, str] = field(default_factory=dict)

    async def update(self, version: int, path: Path | None = None) -> None:
        """Have the provider bring `version`."""
        label = str(version)
        self.weights[label] = str(path or f"/weights/{version}")
        await self.provider.update_weights(Path(self.weights[label]), label)

    def strike(self, step: str, fault: Fault) -> None:
        """The next update meets `fault` in `step`."""
        path, nth = STEPS[type(self.fake).__name__.removeprefix("Fake").lower(), step]
        self.fake.faults[path] = [*[None] * nth, fault]

    async def ask(self) -> GenerationResult:
        """One generation; it may be refused, and then says nothing."""
        params = SamplingParams(max_new_tokens=4)
        return await self.provider.generate(GenerationRequest(PROMPT, params, request_id=uuid4().hex))

    def require_true_labels(self) -> None:
        """Whatever was sampled carries the label of the weights that did it, or one that is no version."""
        for weights, labels in self.fake.sampled:
            for label in labels:
                assert label.startswith("updating-") or self.weights[label] == weights


def unmeasured(fake: FakeServer) -> Provider:
    """A provider that generates nothing when it is entered."""
    return fake_provider(fake, logprob_scale=LogprobScale.AFTER_TEMPERATURE)


@asynccontextmanager
async def served(kind: str) -> AsyncIterator[Server]:
    """A server that has taken a number of updates."""
    fake = make_fake(kind, scripted_engine(ScriptStep(text="Hello there.")))
    async with serving(fake, notices_disconnects=kind == "vllm"), unmeasured(fake) as provider:
        server = Server(fake, provider, {"0": fake.first_weights})
        for version in range(1, GOOD_UPDATES + 1):
            await server.update(version)
        yield server


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.LOST])
@pytest.mark.parametrize(("kind", "step"), STEPS, ids="-".join)
async def test_whatever_step_fails_no_token_has_the_version_of_other_weights(kind: str, step: str, fault: Fault):
    """It samples under its true label, or not at all; the next update finds it, and it serves again."""
    async with served(kind) as server:
        server.strike(step, fault)
        bad, good = GOOD_UPDATES + 1, GOOD_UPDATES + 2
        with suppress(EngineError):
            await server.update(bad)
        if server.provider.weight_version == f"updating-{bad}":
            with pytest.raises(WeightsUnsettled, match="stays paused"):
                await server.provider.resume()
        else:
            await server.provider.resume()
            await server.ask()

        await server.update(good)
        await server.ask()

        assert (server.provider.weight_version, server.fake.sampled[-1]) == (
            str(good),
            (f"/weights/{good}", {str(good)}),
        )
        server.require_true_labels()


@pytest.mark.parametrize("path", [None, UNFIT_WEIGHTS], ids=["hangs", "fails"])
@pytest.mark.parametrize("kind", KINDS)
async def test_weights_that_are_half_loaded_are_never_put_back_by_guess(kind: str, path: Path | None):
    """What the server was started with is not what it served last, and nobody here knows what that was."""
    async with served(kind) as server:
        if path is None:
            server.strike("load", Fault.HANGS)
            updating = asyncio.create_task(server.update(7))
            await eventually(lambda: server.fake.posted[-1] == STEPS[kind, "load"][0])
            updating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await updating
        else:
            with pytest.raises(WeightsUnsettled, match="its weights are unknown"):
                await server.update(7, path)

        assert server.provider.weight_version == server.fake.engine.weight_version == "updating-7"
        assert server.fake.posted[-1] not in ("/resume", "/continue_generation")
        assert server.fake.weights != server.fake.first_weights


async def test_a_cancellation_behind_the_load_does_not_keep_the_label_from_it():
    """The weights are there: the rest takes a moment, and is brought to its end."""
    async with served("vllm") as server:
        flush = server.fake.holds["/reset_prefix_cache"] = asyncio.Event()
        updating = asyncio.create_task(server.update(7))
        await eventually(lambda: server.fake.posted[-1] == "/reset_prefix_cache")
        updating.cancel()
        await asyncio.sleep(0)
        flush.set()
        with pytest.raises(asyncio.CancelledError):
            await updating

        assert (server.fake.engine.weight_version, server.provider.weight_version) == ("7", "7")
        assert server.fake.posted[-1] == "/resume"


@pytest.mark.parametrize("kind", KINDS)
async def test_updates_of_one_server_follow_one_another(kind: str):
    """Two at once would give the weights of one the label of the other."""
    async with served(kind) as server:
        await asyncio.gather(server.update(7), server.update(8))
        await server.ask()

        assert server.fake.sampled[-1] == ("/weights/8", {"8"})


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_somebody_else_left_unsettled_is_not_continued(kind: str):
    """Its label says it to every process, also to one that knows nothing of the update."""
    async with (
        served(kind) as server,
        fake_provider(server.fake, logprob_scale=LogprobScale.AFTER_TEMPERATURE) as other,
    ):
        await other.pause(PauseMode.ABORT)
        server.strike("load", Fault.REFUSED)
        with pytest.raises(WeightsUnsettled):
            await server.update(7)

        with pytest.raises(WeightsUnsettled, match="'updating-7'"):
            await other.resume()


@pytest.mark.parametrize("kind", KINDS)
async def test_the_version_is_taken_from_every_reply(kind: str):
    """Somebody else updates the server, and nobody asks what it serves."""
    async with served(kind) as server:
        server.fake.engine.relabel("9")
        await server.provider.health()
        assert server.provider.weight_version == str(GOOD_UPDATES)

        await server.ask()

        assert server.provider.weight_version == "9"


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_that_comes_late_does_not_take_the_version_back(kind: str):
    """A generation that began before an update ends after it, when the server has told of the new version."""
    async with served(kind) as server:
        server.fake.engine.relabel("3")
        await server.provider.read_version()
        server.fake.engine._script = type(server.fake.engine._script)(
            (ScriptStep(text="Hello." * 50, token_delay_s=60),)
        )
        asking = asyncio.create_task(server.ask())
        await eventually(lambda: any(live.sampled for live in server.fake.engine.live))
        server.fake.engine.relabel("9")
        await server.provider.read_version()
        await server.provider.abort(None)
        late = await asking

        assert [span.version for span in late.version_spans] == ["3"]
        assert server.provider.weight_version == "9"
