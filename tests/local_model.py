"""The local engine with the real model, a small random one, and the model's own forward pass to compare them with.

A test process stays below three gigabytes. An engine holds 1.2 of them (the weights in float32 and the copy that is
packed for the processor), a plain model half of one: of each there is one at a time, and none outlives its module.
"""

import asyncio
import gc
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.tokens.tokenizer import Tokenizer
from harness.types import GenerationRequest, GenerationResult, Logprobs, SamplingParams, TokenIds, as_ids
from tests.ground_truth import logprobs_of

KV_BYTES = 64 << 20
"""Of an engine with the model: 5,000 tokens. What is kept of prefixes grows to the bound in a session of tests."""

LOCAL_ENGINE_GROUP = pytest.mark.xdist_group("local_engine")
"""Of tests that share an engine with the real model: one worker loads it, not both."""


@pytest.fixture(scope="session", name="tokenizer")
def _tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="session", name="prompt")
def _prompt(tokenizer: Tokenizer) -> Callable[[str], TokenIds]:
    """Ids of a conversation in which a user says something."""

    def encode(text: str) -> TokenIds:
        return as_ids(tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"))

    return encode


class LocalEngines:
    """Local engines with the real model, of which one runs at a time."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._running: HuggingFaceTokenProvider | None = None
        self._settings: dict[str, Any] = {}

    async def open(self, **settings: Any) -> HuggingFaceTokenProvider:
        """The engine with `settings`, the one that runs if it has them; any other one ends."""
        if self._running is None or settings != self._settings:
            await self.close()
            engine = HuggingFaceTokenProvider(self._model_dir, **{"kv_cache_bytes": KV_BYTES, **settings})
            self._running, self._settings = await engine.__aenter__(), settings
        return self._running

    async def close(self) -> None:
        """None runs any more, and its memory is free."""
        engine, self._running = self._running, None
        if engine is not None:
            await engine.__aexit__(None, None, None)
            del engine
            gc.collect()


@pytest.fixture(scope="module", name="local_engines")
def _local_engines(model_dir: Path) -> Iterator[LocalEngines]:
    engines = LocalEngines(model_dir)
    yield engines
    asyncio.run(engines.close())


@pytest.fixture(scope="module", name="engine")
def _engine(local_engines: LocalEngines) -> HuggingFaceTokenProvider:
    """The real model, shared by the tests of a module: each leaves it unpaused, with its first weights."""
    return asyncio.run(local_engines.open(max_batch=16, step_tokens=64))


class PlainModel:
    """The model as transformers runs it: no cache, no batch. It is loaded when it is asked, in the place of another."""

    _loaded: tuple[Path, Any] | None = None

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @classmethod
    def forget(cls) -> None:
        """None is in memory any more."""
        PlainModel._loaded = None
        gc.collect()

    @property
    def _model(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        if PlainModel._loaded is None or PlainModel._loaded[0] != self._directory:
            self.forget()
            model = AutoModelForCausalLM.from_pretrained(self._directory, dtype=torch.float32).eval()
            PlainModel._loaded = self._directory, model
        return PlainModel._loaded[1]

    def distributions(self, ids: TokenIds) -> np.ndarray:
        """Logprobs of every token after each position, shape [n, vocabulary]."""
        import torch

        with torch.inference_mode():
            logits = self._model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0]
            return logits.log_softmax(-1).numpy()

    def logprobs(self, ids: TokenIds) -> Logprobs:
        """Logprob of `ids[1:]`, each given everything before it."""
        return logprobs_of(self._model, ids)


@pytest.fixture(scope="module", name="plain_model")
def _plain_model() -> Iterator[type[PlainModel]]:
    yield PlainModel
    PlainModel.forget()


@pytest.fixture(name="plain")
def _plain(model_dir: Path, plain_model: type[PlainModel]) -> PlainModel:
    return plain_model(model_dir)


@dataclass(frozen=True)
class Update:
    """Weights to change from and to, and the models they make."""

    old_dir: Path
    new_dir: Path
    old: PlainModel
    new: PlainModel


@pytest.fixture(name="update")
def _update(model_dir: Path, perturbed_dir: Path, plain_model: type[PlainModel]) -> Update:
    return Update(model_dir, perturbed_dir, plain_model(model_dir), plain_model(perturbed_dir))


@dataclass(frozen=True)
class Asking:
    """Shorthand for requests with fresh ids."""

    provider: HuggingFaceTokenProvider

    async def generate(
        self,
        ids: TokenIds,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        session_id: str | None = None,
        prompt_logprobs_from: int | None = None,
    ) -> GenerationResult:
        return await self.provider.generate(
            GenerationRequest(
                ids,
                params,
                request_id=request_id or uuid.uuid4().hex,
                session_id=session_id,
                prompt_logprobs_from=prompt_logprobs_from,
            )
        )


@pytest.fixture(name="ask")
def _ask(engine: HuggingFaceTokenProvider) -> Asking:
    return Asking(engine)


@pytest.fixture(scope="session", name="make_small_model")
def _make_small_model(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a random two-layer model with the real tokenizer; takes the class of its configuration and settings."""

    def make(config_class: str = "LlamaConfig", **settings: object) -> Path:
        import torch
        import transformers

        torch.manual_seed(0)
        shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        defaults = {**shape, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 49152, "pad_token_id": 2}
        config = getattr(transformers, config_class)(**{**defaults, "eos_token_id": 2, "bos_token_id": 1, **settings})
        directory = tmp_path_factory.mktemp("small")
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        (directory / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
        return directory

    return make


@pytest.fixture(scope="session", name="small_dir")
def _small_dir(make_small_model: Callable[..., Path]) -> Path:
    return make_small_model()
