"""The local engine with the real model, a small random one, and the model's own forward pass to compare them with."""

import asyncio
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.tokens.tokenizer import Tokenizer
from harness.types import GenerationRequest, GenerationResult, Logprobs, SamplingParams, TokenIds, as_ids
from tests.ground_truth import logprobs_of

KV_BYTES = 256 << 20
"""Of an engine with the real model: 5,000 tokens. What is kept of prefixes grows to the bound in a session of tests."""


@pytest.fixture(scope="session", name="tokenizer")
def _tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="session", name="prompt")
def _prompt(tokenizer: Tokenizer) -> Callable[[str], TokenIds]:
    """Ids of a conversation in which a user says something."""

    def encode(text: str) -> TokenIds:
        return as_ids(tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"))

    return encode


@pytest.fixture(scope="session", name="engine")
def _engine(model_dir: Path) -> Iterator[HuggingFaceTokenProvider]:
    """The real model, shared by all tests: each leaves it unpaused, with its first weights."""
    provider = HuggingFaceTokenProvider(model_dir, max_batch=16, step_tokens=64, kv_cache_bytes=KV_BYTES)
    asyncio.run(provider.__aenter__())
    yield provider
    asyncio.run(provider.__aexit__(None, None, None))


class PlainModel:
    """The model as transformers runs it: no cache, no batch."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def distributions(self, ids: TokenIds) -> np.ndarray:
        """Logprobs of every token after each position, shape [n, vocabulary]."""
        import torch

        with torch.inference_mode():
            logits = self._model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0]
            return logits.log_softmax(-1).numpy()

    def logprobs(self, ids: TokenIds) -> Logprobs:
        """Logprob of `ids[1:]`, each given everything before it."""
        return logprobs_of(self._model, ids)

    def greedy(self, ids: TokenIds, count: int) -> list[int]:
        """The `count` most likely tokens after `ids`, one at a time."""
        output: list[int] = []
        for _ in range(count):
            output.append(int(self.distributions(np.concatenate([ids, as_ids(output)]))[-1].argmax()))
        return output

    def save_perturbed(self, directory: Path) -> Path:
        """A checkpoint with slightly different weights; returns `directory`."""
        import torch
        from safetensors.torch import save_file

        generator = torch.Generator().manual_seed(0)
        tensors = {
            name: tensor + 0.01 * torch.randn(tensor.shape, generator=generator) * tensor.std()
            for name, tensor in self._model.named_parameters()
        }
        directory.mkdir(parents=True)
        save_file({name: tensor.detach() for name, tensor in tensors.items()}, directory / "model.safetensors")
        self._model.config.save_pretrained(directory)
        return directory


@pytest.fixture(scope="session", name="plain_model")
def _plain_model() -> type[PlainModel]:
    return PlainModel


# Half a gigabyte each, so they live no longer than the module that asks for them.


@pytest.fixture(scope="module", name="plain")
def _plain(model_dir: Path) -> PlainModel:
    return PlainModel(model_dir)


@dataclass(frozen=True)
class Update:
    """Weights to change from and to, and the models they make."""

    old_dir: Path
    new_dir: Path
    old: PlainModel
    new: PlainModel


@pytest.fixture(scope="module", name="update")
def _update(model_dir: Path, plain: PlainModel, tmp_path_factory: pytest.TempPathFactory) -> Update:
    new_dir = plain.save_perturbed(tmp_path_factory.mktemp("weights") / "new")
    return Update(model_dir, new_dir, plain, PlainModel(new_dir))


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
