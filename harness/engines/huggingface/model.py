"""The model: loading, the ragged forward pass, and weight updates, all on the engine's thread.

Loading compares the ragged pass with the model's own forward pass and refuses a model for which they differ: this
engine serves as ground truth about the weights.
"""

import hashlib
from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Linear, Module
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from harness.engines.huggingface import ragged_attention
from harness.engines.huggingface.ragged_attention import KvStorage, RaggedPiece
from harness.engines.huggingface.scheduler import KvOp, StepPiece
from harness.engines.huggingface.scheduler import Sequence as TokenSequence
from harness.errors import EngineRejected, ModelError
from harness.expert_choice import Routers
from harness.token_rows import RoutedExperts, RowValues

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_CHECK_TOKENS = 24
_FEWEST_ROWS = 4  # below this, another kernel is used, which is slower and sums in another order
_TOLERANCES = {"float64": 1e-3, "float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Largest mean logprob difference at one position; rounding alone stays below half."""


class ModelFacts(NamedTuple):
    vocab_size: int
    context_length: int
    kv_bytes_per_token: int
    weights_digest: str
    routed_experts: RoutedExperts | None


class RaggedModel:
    """Causal language model that computes pieces of many sequences in one pass."""

    def __init__(self, model: Any, directory: Path) -> None:
        self._model = model
        self.kv = KvStorage()
        self._routers = Routers(model)
        self._refuse_unsuitable()
        kv_bytes_per_token = self._check_against_plain_forward()
        self.facts = ModelFacts(
            vocab_size=int(self._config.vocab_size),
            context_length=int(self._config.max_position_embeddings),
            kv_bytes_per_token=kv_bytes_per_token,
            weights_digest=_digest(directory),
            routed_experts=self._routers.shape,
        )

    @classmethod
    def load(cls, directory: Path, *, dtype: str, threads: int) -> "RaggedModel":
        """Load the model in `directory`. Raises `ModelError` if it cannot be served."""
        torch.set_num_threads(threads)
        logging.disable_progress_bar()
        ragged_attention.register()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                directory, dtype=getattr(torch, dtype), attn_implementation="eager", local_files_only=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"cannot load the model in {directory}: {error}") from error
        return cls(model.eval(), directory)

    def forward(self, pieces: Sequence[StepPiece], experts: RowValues | None = None) -> Tensor:
        """Return float32 logits [positions, vocabulary] of all wanted positions. `experts` receives each token's."""
        ragged, first = [], 0
        for sequence, start, stop in pieces:
            assert sequence.kv is not None
            kv = self.kv[sequence.kv]
            ragged.append(RaggedPiece(kv, start=start, stop=stop, first=first, capacity=sequence.capacity))
            first += stop - start
        ids = np.concatenate([piece.sequence.ids[piece.start : piece.stop] for piece in pieces])
        positions = np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])
        rows = [np.arange(span.last - len(piece.wanted), span.last) for piece, span in zip(pieces, ragged, strict=True)]
        wanted = np.concatenate(rows)

        def note(layer: int, own: Tensor) -> Tensor:
            if experts is not None:
                experts[:, layer] = own[: len(experts)].numpy()
            return own

        with torch.inference_mode(), nullcontext() if experts is None else self._routers.choosing(note):
            output = self._model(
                input_ids=torch.from_numpy(_pad(ids))[None],
                position_ids=torch.from_numpy(_pad(positions))[None],
                logits_to_keep=torch.from_numpy(_pad(wanted)),
                use_cache=False,
                ragged=ragged,
            )
            logits: Tensor = output.logits[0, : wanted.size].float()
            return logits

    def apply(self, ops: list[KvOp]) -> None:
        with torch.inference_mode():
            self.kv.apply(ops)

    def load_weights(self, directory: Path) -> None:
        """Load the checkpoint in `directory`. Raises `EngineRejected`, with the old weights, if shapes differ."""
        saved = self._model.state_dict().keys()
        own = dict(self._model.named_parameters())
        own |= {name: buffer for name, buffer in self._model.named_buffers() if name in saved}
        new = _read_checkpoint(directory)
        if self._routers.shape is not None:
            new = self._fuse_experts(new)
        aliases = saved - own.keys()
        _require_same_shapes(own, {name: tensor for name, tensor in new.items() if name not in aliases})
        with torch.inference_mode():
            for name, tensor in own.items():
                tensor.copy_(new[name])
        _pack(self._model)

    def _fuse_experts(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        # A checkpoint has a tensor for each expert, the model one for all. transformers knows how to join them.
        try:
            fused = type(self._model).from_pretrained(
                None, config=self._model.config, state_dict=tensors, dtype=self._model.dtype, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineRejected(f"the checkpoint is not of this model: {error}; weights not changed") from error
        loaded, report = fused
        _require_names(report["missing_keys"], report["unexpected_keys"])
        state: dict[str, Tensor] = loaded.state_dict()
        return state

    @property
    def _config(self) -> Any:
        return self._model.config.get_text_config()

    def _refuse_unsuitable(self) -> None:
        """Refuse models whose results depend on the batch, that have no KV, or that need masks."""
        # With flash attention a sliding window is an argument; without, it may exist only as a mask.
        if not getattr(self._model, "_supports_flash_attn", False):
            raise ModelError(f"the local engine cannot run {type(self._model).__name__}: its attention needs masks")
        unknown = set(getattr(self._config, "layer_types", None) or ()) - _LAYER_TYPES
        if unknown:
            raise ModelError(f"the local engine cannot run layers of type {', '.join(sorted(unknown))}")
        rope = (getattr(self._config, "rope_parameters", None) or {}).get("rope_type")
        if rope in _LENGTH_DEPENDENT_ROPE:
            raise ModelError(f"the local engine cannot run rotary embeddings of type {rope}")

    def _check_against_plain_forward(self) -> int:
        """Compare the ragged pass, two sequences in chunks, with the model's own. Return KV bytes per token."""
        sequences, plain = [], []
        for kv in range(2):
            length = _CHECK_TOKENS + kv
            step = max(1, int(self._config.vocab_size) // length - 1)
            ids = np.arange(length, dtype=np.int32) * step + kv  # spread over the vocabulary
            sequences.append(TokenSequence(ids.astype(np.int32), length, logits_from=0, kv=kv, capacity=length))
            with torch.inference_mode(), self._routers.proving():
                output = self._model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
                plain.append(output.logits[0].float().log_softmax(-1))
        ragged = self._compute_ragged_logprobs(sequences)
        difference = float((torch.cat(plain) - torch.cat(ragged)).abs().mean(dim=-1).max())
        tolerance = _TOLERANCES[str(self._model.dtype).removeprefix("torch.")]
        if not difference <= tolerance:
            raise ModelError(
                f"the local engine's logprobs differ from the model's own forward pass by {difference:.2g},"
                f" at most {tolerance} is allowed; serve this model elsewhere"
            )
        kv_bytes_per_token = self.kv.bytes_per_token(0)
        self.kv.clear()
        return kv_bytes_per_token

    def _compute_ragged_logprobs(self, sequences: Sequence[TokenSequence]) -> list[Tensor]:
        half = _CHECK_TOKENS // 2
        try:
            self._model.set_attn_implementation(ragged_attention.NAME)
            _pack(self._model)
            firsts = self.forward([StepPiece(sequence, 0, half) for sequence in sequences])
            seconds = self.forward([StepPiece(sequence, half, sequence.length) for sequence in sequences])
        except (TypeError, ValueError) as error:
            raise ModelError(f"the local engine cannot replace the attention of this model: {error}") from error
        rests = seconds.split([sequence.length - half for sequence in sequences])
        pairs = zip(firsts.split(half), rests, strict=True)
        return [torch.cat(pair).log_softmax(-1) for pair in pairs]


def _pad(row: Any) -> Any:
    # Fewer rows would use another kernel with other rounding.
    missing = max(_FEWEST_ROWS - row.size, 0) if row.size else 0
    return np.pad(row.astype(np.int64), (0, missing))


def _weight_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def _read_checkpoint(directory: Path) -> dict[str, Tensor]:
    files = _weight_files(directory)
    if not files:
        raise EngineRejected(f"expected a checkpoint with *.safetensors in {directory}, found none")
    # All in memory before any weight is replaced.
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise EngineRejected(f"cannot read the weights in {path}: {error}") from error
    return tensors


def _require_same_shapes(own: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    _require_names(own.keys() - new.keys(), new.keys() - own.keys())
    for name, tensor in own.items():
        if tensor.shape != new[name].shape:
            raise EngineRejected(
                f"{name} has shape {tuple(new[name].shape)}, expected {tuple(tensor.shape)}; weights not changed"
            )


def _require_names(missing: Set[str], unknown: Set[str]) -> None:
    if missing or unknown:
        raise EngineRejected(
            f"the checkpoint lacks {sorted(missing)[:3]} and has unknown {sorted(unknown)[:3]}; weights not changed"
        )


def _digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in _weight_files(directory):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _pack(model: Module) -> None:
    """Make every linear layer use a copy of its present weights packed for oneDNN, if torch supports it."""
    # On a CPU this is about twice as fast as the plain layer for the few rows of a decoding step. With at least
    # `_FEWEST_ROWS` rows, a row's result does not depend on the others: outputs are bitwise independent of the batch.
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return
    with torch.inference_mode():
        for module in model.modules():
            if type(module) is Linear:
                module.forward = _PackedForward(module)


class _PackedForward:
    __slots__ = ("_bias", "_features", "_multiply", "_packed")

    def __init__(self, linear: Linear) -> None:
        operators = torch.ops.mkldnn  # the ones that torch.compile calls; torch has no public name for them
        self._packed = operators._reorder_linear_weight(linear.weight, None)  # noqa: SLF001  # no public name
        self._bias = linear.bias
        self._features = linear.out_features
        self._multiply = operators._linear_pointwise.default  # noqa: SLF001  # as above

    def __call__(self, rows: Tensor) -> Tensor:
        if not rows.numel():
            return rows.new_empty((*rows.shape[:-1], self._features))
        return self._multiply(rows, self._packed, self._bias, "none", [], "")
