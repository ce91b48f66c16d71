"""Every kind of provider over something real enough to keep its promises: what the conformance suite runs on.

`HARNESS_SGLANG_URL` and `HARNESS_VLLM_URL` add real servers of SmolLM2-135M-Instruct; `HARNESS_WEIGHTS_A` and
`HARNESS_WEIGHTS_B` name two of its checkpoints on the servers' machine, which enables the tests that change weights.
"""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from toy_model import write_toy_model

from harness.engines.base import LogprobScale, TokenProvider
from harness.engines.pool import EnginePool
from harness.engines.scripted import Script, ScriptedEngine, Step
from harness.engines.sglang import SGLangTokenProvider
from harness.engines.vllm import VLLMTokenProvider
from harness.models import resolve_model
from harness.tokens.tokenizer import Tokenizer
from harness.types import TokenIds, as_ids
from tests.engines.fake_server import FakeServer, serving
from tests.engines.fake_sglang import FakeSGLang
from tests.engines.fake_vllm import FakeVLLM


@cache
def toy_tokenizer() -> Tokenizer:
    """Bytes as tokens."""
    with TemporaryDirectory() as directory:
        return Tokenizer.load(write_toy_model(Path(directory)))


LOREM = "The quick brown fox jumps over the lazy dog. " * 40
SLOWLY = Step(text=LOREM, token_delay_s=0.004)


@dataclass(frozen=True)
class Bench:
    """A provider that has been entered, and what a test has to know about it."""

    provider: TokenProvider
    prompt: TokenIds
    tokenizer: Tokenizer
    tolerance: float
    """Between a logprob when sampled and when scored, in nats."""
    honours_seed: bool
    weights: tuple[Path, Path] | None
    """Two checkpoints to change between; the second one is loaded first."""
    reports_spans: bool = True
    """Whether a generation can carry more than one version."""
    refuses_unfit_weights: bool = True
    slow_tokens: int = 400
    """A budget that takes a second or more."""
    step_s: float = 0.2
    """Longer than the engine takes for one token."""
    steadiness: float = 0.0
    """Between two runs of the same greedy request, in nats."""


Opening = Callable[[], AbstractAsyncContextManager[Bench]]


def scripted_engine(*steps: Step) -> ScriptedEngine:
    """A scripted engine with the toy tokenizer and a context that tests can fill."""
    return ScriptedEngine(toy_tokenizer(), Script(steps or (SLOWLY,)), context_length=4096)


def fake_provider(fake: FakeServer, **options: object) -> SGLangTokenProvider | VLLMTokenProvider:
    """A provider for `fake`, which is being served."""
    kind = SGLangTokenProvider if isinstance(fake, FakeSGLang) else VLLMTokenProvider
    return kind(fake.url, vocab_size=toy_tokenizer().vocab_size, **options)  # type: ignore[arg-type]


def make_fake(kind: str, engine: ScriptedEngine, **options: bool) -> FakeServer:
    """The fake server that stands for `kind`."""
    match kind:
        case "sglang":
            return FakeSGLang(engine, **options)
        case "sglang-incremental":
            return FakeSGLang(engine, incremental=True, **options)
        case "vllm":
            return FakeVLLM(engine, **options)
        case "vllm-completions":
            return FakeVLLM(engine, scale_out=False, **options)
    raise AssertionError(kind)


FAKE_KINDS = ("sglang", "sglang-incremental", "vllm", "vllm-completions")


def _toy_bench(provider: TokenProvider, **facts: bool) -> Bench:
    ids = as_ids(toy_tokenizer().encode_plain("Say something, please."))
    paths = (Path("/weights/a"), Path("/weights/b"))
    return Bench(provider, ids, toy_tokenizer(), tolerance=1e-6, honours_seed=True, weights=paths, **facts)


@asynccontextmanager
async def _scripted() -> AsyncIterator[Bench]:
    async with scripted_engine() as engine:
        yield _toy_bench(engine, refuses_unfit_weights=False)


def _fake(kind: str) -> Opening:
    @asynccontextmanager
    async def opening() -> AsyncIterator[Bench]:
        fake = make_fake(kind, scripted_engine())
        async with serving(fake, notices_disconnects=kind.startswith("vllm")), fake_provider(fake) as provider:
            yield _toy_bench(provider, reports_spans=kind != "vllm-completions")

    return opening


@asynccontextmanager
async def _pool() -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        fakes = [make_fake(kind, scripted_engine()) for kind in ("sglang", "vllm")]
        for fake in fakes:
            await stack.enter_async_context(serving(fake, notices_disconnects=isinstance(fake, FakeVLLM)))
        pool = EnginePool([fake_provider(fake) for fake in fakes])
        yield _toy_bench(await stack.enter_async_context(pool))


def _real(url: str, provider_class: type[SGLangTokenProvider] | type[VLLMTokenProvider]) -> Opening:
    @asynccontextmanager
    async def opening() -> AsyncIterator[Bench]:
        tokenizer = Tokenizer.load(resolve_model("smollm2-135m-instruct"))
        provider = provider_class(url, vocab_size=tokenizer.vocab_size, logprob_scale=LogprobScale.RAW)
        ids = tokenizer.encode("<|im_start|>user\nName three rivers.<|im_end|>\n<|im_start|>assistant\n")
        paths = os.environ.get("HARNESS_WEIGHTS_A"), os.environ.get("HARNESS_WEIGHTS_B")
        async with provider:
            yield Bench(
                provider,
                as_ids(ids),
                tokenizer,
                tolerance=0.25,
                honours_seed=provider_class is VLLMTokenProvider,
                reports_spans="/v1/completions" not in (await provider.health()).detail,
                weights=(Path(paths[0]), Path(paths[1])) if paths[0] and paths[1] else None,
                slow_tokens=120,
                step_s=2.0,
                steadiness=0.1,
            )

    return opening


def openings() -> dict[str, Opening]:
    """Every provider that can be opened here, by name."""
    found: dict[str, Opening] = {"scripted": _scripted, "pool": _pool} | {kind: _fake(kind) for kind in FAKE_KINDS}
    if url := os.environ.get("HARNESS_SGLANG_URL"):
        found["real-sglang"] = _real(url, SGLangTokenProvider)
    if url := os.environ.get("HARNESS_VLLM_URL"):
        found["real-vllm"] = _real(url, VLLMTokenProvider)
    return found
