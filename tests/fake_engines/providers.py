"""Every kind of provider over something real enough to keep its promises: what the conformance suite runs on.

Where engines differ, the difference is an `Expectations`: the suite asserts it either way, and the table in
docs/engines.md shows it.
"""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, NamedTuple

import pytest

from harness.engines.base import LogprobScale, TokenProvider
from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.engines.pool.pool import EnginePool
from harness.engines.remote.sglang import SGLangTokenProvider
from harness.engines.remote.vllm import VLLMTokenProvider
from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.engines.sglang_server import NativeServer, serve_in_process
from harness.lab.lanes import LaneEngine
from harness.tokens.tokenizer import Tokenizer
from harness.types import TokenIds, as_ids
from tests.fake_engines.fake_server import FakeServer, serving
from tests.fake_engines.fake_sglang import FakeSGLang
from tests.fake_engines.fake_vllm import FakeVLLM
from tests.local_model import LOCAL_ENGINE_GROUP
from tests.real_engines import on_real
from tests.toy_model import write_toy_model


@cache
def toy_tokenizer() -> Tokenizer:
    """Bytes as tokens."""
    with TemporaryDirectory() as directory:
        return Tokenizer.load(write_toy_model(Path(directory)))


@cache
def smollm2_tokenizer(model_dir: Path) -> Tokenizer:
    """Of the real model; every test on an engine that serves it asks for it twice."""
    return Tokenizer.load(model_dir)


LOREM = "The quick brown fox jumps over the lazy dog. " * 40
SLOWLY = ScriptStep(text=LOREM, token_delay_s=0.004)


def _row(title: str) -> bool:
    """A field of `Expectations`, kept unless an engine says otherwise."""
    return field(default=True, metadata={"title": title})


@dataclass(frozen=True)
class Expectations:
    """Where engines differ, as the list in docs/engines.md has it."""

    honors_seed: bool = _row("a seed reproduces the tokens")
    reports_spans: bool = _row("a reply over a weight update says which tokens are whose")
    refuses_unfit_weights: bool = _row("a checkpoint that does not fit is refused")
    stops_despite_ignored_eos: bool = _row("stop ids count together with `ignore_eos`")
    streams_scored_prompts: bool = _row("a stream with prompt logprobs has many deltas")
    keeps_ends_away: bool = _row("`min_tokens` keeps ends away")
    follows_json_schema: bool = _row("an answer follows a JSON schema")


SCRIPTED = Expectations(refuses_unfit_weights=False, keeps_ends_away=False, follows_json_schema=False)
LOCAL = Expectations(follows_json_schema=False)
LOCAL_SERVED = replace(LOCAL, stops_despite_ignored_eos=False)
SGLANG = Expectations(honors_seed=False, stops_despite_ignored_eos=False)
VLLM = Expectations(streams_scored_prompts=False)
VLLM_COMPLETIONS = replace(VLLM, reports_spans=False)

DOCUMENTED = {
    "`scripted`": SCRIPTED,
    "`local`": LOCAL,
    "`local` as a server": LOCAL_SERVED,
    "`sglang`": SGLANG,
    "`vllm`": VLLM,
    "`vllm` without `--enable-scale-out`": VLLM_COMPLETIONS,
}
"""The engines of the list in docs/engines.md."""


def documented_exceptions() -> list[str]:
    """The lines of the list in docs/engines.md."""
    missing = {
        row: [name for name, has in DOCUMENTED.items() if not getattr(has, row.name)] for row in fields(Expectations)
    }
    return [f"- {row.metadata['title']}: not {', '.join(names)}" for row, names in missing.items()]


@dataclass(frozen=True)
class Bench:
    """A provider that has been entered, and what a test has to know about it."""

    provider: TokenProvider
    prompt: TokenIds
    tokenizer: Tokenizer
    expects: Expectations
    weights: tuple[Path, Path]
    """Two checkpoints to change between; the first one is being served."""
    unfit_weights: Path
    has_weights: bool = False
    """What it samples depends on the checkpoint, and not on its label only."""
    tolerance: float = 1e-6
    """Between a logprob when sampled and when scored, and between two runs of one greedy request, in nats."""
    slow_tokens: int = 400
    """A budget that takes a second or more."""
    step_s: float = 0.2
    """Longer than the engine takes for one token."""


Opening = Callable[..., AbstractAsyncContextManager[Bench]]


@dataclass(frozen=True)
class Kind:
    """How to open a provider of one kind."""

    name: str
    open: Opening
    """Called with the values of the fixtures `needs`."""
    needs: tuple[str, ...] = ()
    marks: tuple[pytest.MarkDecorator, ...] = ()

    def parameter(self) -> Any:
        """This kind as a parameter of a fixture."""
        return pytest.param(self, id=self.name, marks=self.marks)


class PacedEngine(ScriptedEngine):
    """Waits before tokens as its script says, until it `hurries`."""

    hurries = False

    async def _wait(self, live: Any, delay_s: float) -> bool:
        return await super()._wait(live, 0.0 if self.hurries else delay_s)


def scripted_engine(*steps: ScriptStep) -> PacedEngine:
    """A scripted engine with the toy tokenizer and a context that tests can fill."""
    return PacedEngine(toy_tokenizer(), Script(steps or (SLOWLY,)), context_length=4096)


def fake_provider(fake: FakeServer, **options: Any) -> SGLangTokenProvider | VLLMTokenProvider:
    """A provider for `fake`, which is being served."""
    kind = SGLangTokenProvider if isinstance(fake, FakeSGLang) else VLLMTokenProvider
    return kind(fake.url, vocab_size=toy_tokenizer().vocab_size, **options)


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


class ToyCheckpoints(NamedTuple):
    """Folders that hold the headers of checkpoints: two that fit each other, and one of another model."""

    first: Path
    second: Path
    unfit: Path


@cache
def toy_checkpoints() -> ToyCheckpoints:
    """Written once for the test session."""
    folder = Path(mkdtemp())
    for name, shape in (("first", [2, 3]), ("second", [2, 3]), ("unfit", [2, 4])):
        header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return ToyCheckpoints(folder / "first", folder / "second", folder / "unfit")


def _toy_bench(provider: TokenProvider, expects: Expectations) -> Bench:
    ids = as_ids(toy_tokenizer().encode_plain("Say something, please."))
    checkpoints = toy_checkpoints()
    return Bench(
        provider,
        ids,
        toy_tokenizer(),
        expects,
        weights=(checkpoints.first, checkpoints.second),
        unfit_weights=checkpoints.unfit,
    )


@asynccontextmanager
async def _scripted() -> AsyncIterator[Bench]:
    async with scripted_engine() as engine:
        yield _toy_bench(engine, SCRIPTED)


_SAYS_ITS_SCRIPT = {"keeps_ends_away": False, "follows_json_schema": False}
_FAKED = {
    "sglang": replace(SGLANG, honors_seed=True, **_SAYS_ITS_SCRIPT),
    "sglang-incremental": replace(SGLANG, honors_seed=True, **_SAYS_ITS_SCRIPT),
    "vllm": replace(VLLM, **_SAYS_ITS_SCRIPT),
    "vllm-completions": replace(VLLM_COMPLETIONS, **_SAYS_ITS_SCRIPT),
}


def _fake(kind: str) -> Kind:
    @asynccontextmanager
    async def opening() -> AsyncIterator[Bench]:
        fake = make_fake(kind, scripted_engine())
        fake.first_weights = str(toy_checkpoints().first)
        async with serving(fake, notices_disconnects=kind.startswith("vllm")), fake_provider(fake) as provider:
            yield _toy_bench(provider, _FAKED[kind])

    return Kind(f"fake-{kind}", opening)


def _pool(kind: str) -> Kind:
    @asynccontextmanager
    async def opening() -> AsyncIterator[Bench]:
        async with AsyncExitStack() as stack:
            fakes = [make_fake(kind, scripted_engine()) for _ in range(2)]
            for fake in fakes:
                fake.first_weights = str(toy_checkpoints().first)
                await stack.enter_async_context(serving(fake, notices_disconnects=kind.startswith("vllm")))
            pool = EnginePool([fake_provider(fake) for fake in fakes])
            yield _toy_bench(await stack.enter_async_context(pool), _FAKED[kind])

    return Kind(f"pool-{kind}", opening)


def _smollm2_bench(
    provider: TokenProvider, expects: Expectations, model_dir: Path, perturbed_dir: Path, unfit_dir: Path
) -> Bench:
    tokenizer = smollm2_tokenizer(model_dir)
    prompt = tokenizer.encode("<|im_start|>user\nName three rivers.<|im_end|>\n<|im_start|>assistant\n")
    return Bench(
        provider,
        as_ids(prompt),
        tokenizer,
        expects,
        weights=(model_dir, perturbed_dir),
        unfit_weights=unfit_dir,
        has_weights=True,
        tolerance=1e-3,
        slow_tokens=120,
        step_s=1.0,
    )


@asynccontextmanager
async def _local(engine: HuggingFaceTokenProvider, *folders: Path) -> AsyncIterator[Bench]:
    yield replace(_smollm2_bench(engine, LOCAL, *folders), slow_tokens=120)


@asynccontextmanager
async def _scripted_served() -> AsyncIterator[Bench]:
    async with scripted_engine() as engine, served(engine, toy_tokenizer(), Path("/weights/a")) as provider:
        yield _toy_bench(provider, replace(SCRIPTED, stops_despite_ignored_eos=False))


@asynccontextmanager
async def _local_served(engine: HuggingFaceTokenProvider, model_dir: Path, *others: Path) -> AsyncIterator[Bench]:
    async with served(engine, smollm2_tokenizer(model_dir), model_dir) as provider:
        yield replace(_smollm2_bench(provider, LOCAL_SERVED, model_dir, *others), slow_tokens=120)


@asynccontextmanager
async def served(engine: TokenProvider, tokenizer: Tokenizer, model_dir: Path) -> AsyncIterator[SGLangTokenProvider]:
    """`engine` behind a socket, and the provider that finds it there; a test of its own measures the scale."""
    async with (
        serve_in_process(NativeServer(engine, tokenizer, model_dir).app()) as url,
        SGLangTokenProvider(url, vocab_size=tokenizer.vocab_size, logprob_scale=LogprobScale.RAW) as provider,
    ):
        yield provider


@asynccontextmanager
async def _sglang(url: str, model_dir: Path, *others: Path) -> AsyncIterator[Bench]:
    vocab_size = smollm2_tokenizer(model_dir).vocab_size
    async with SGLangTokenProvider(url, vocab_size=vocab_size, logprob_scale=LogprobScale.RAW) as provider:
        yield _smollm2_bench(provider, SGLANG, model_dir, *others)


@asynccontextmanager
async def _vllm(url: str, model_dir: Path, *others: Path) -> AsyncIterator[Bench]:
    vocab_size = smollm2_tokenizer(model_dir).vocab_size
    async with VLLMTokenProvider(url, vocab_size=vocab_size, logprob_scale=LogprobScale.RAW) as provider:
        yield _smollm2_bench(provider, VLLM, model_dir, *others)


_ON_WEIGHTS = (pytest.mark.model, pytest.mark.timeout(600), LOCAL_ENGINE_GROUP)
_FOLDERS = ("model_dir", "perturbed_dir", "unfit_dir")

KINDS = (
    Kind("scripted", _scripted),
    Kind("scripted-served", _scripted_served),
    *(_fake(kind) for kind in FAKE_KINDS),
    *(_pool(kind) for kind in ("sglang", "vllm")),
    Kind("local", _local, ("small_context_engine", *_FOLDERS), _ON_WEIGHTS),
    Kind("sglang", _sglang, ("sglang_url", *_FOLDERS), tuple(on_real(LaneEngine.SGLANG))),
    Kind("vllm", _vllm, ("vllm_url", *_FOLDERS), tuple(on_real(LaneEngine.VLLM))),
)
"""Every provider there is, the real engines included; a session that runs the suite runs it on all of them."""

LOCAL_SERVED_KIND = Kind("local-served", _local_served, ("small_context_engine", *_FOLDERS), _ON_WEIGHTS)
"""`local` behind the wire of `scripted-served`: what `Expectations` say of it is neither the one nor the other."""
