"""Logprobs of a branch by plain forward passes, which follow the engine in the causes that they are given."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import signature
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from harness.engines.huggingface.sampling import filter_logits
from harness.errors import ModelError, RunError
from harness.expert_choice import Routers
from harness.token_rows import RowState
from harness.training.audit.branches import AuditedBranch, BranchTokens, ReadBranch, effective
from harness.training.audit.causes import GapCause
from harness.training.learner.packed_forward import replaying

TEMPERATURES = (*np.arange(5, 16).round(1) / 10,)
"""Factors of temperature that an audit tries, besides the run's own."""

_MODELS = 3  # in memory at once, in float32: the trainer's, and a branch's that an update met


class _Model(NamedTuple):
    causal: Any
    routers: Routers

    def taking(self, cache: Any) -> dict[str, Any]:
        """Return the argument of a pass that reads and extends `cache`."""
        # transformers 5.30 renamed it.
        name = "cache" if "cache" in signature(self.causal.forward).parameters else "past_key_values"
        return {} if cache is None else {name: cache}

    @contextmanager
    def computing_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Compute in `dtype` during the block."""
        # A second model in memory, or loading in another dtype, which changes torch's default, would cost more.
        kept = [(parameter, parameter.data) for parameter in self.causal.parameters()]
        try:
            for parameter, data in kept:
                parameter.data = data.to(dtype)
            yield
        finally:
            for parameter, data in kept:
                parameter.data = data


class Reference:
    """Models by version. Methods raise `ModelError` for one that cannot be loaded."""

    def __init__(self, weights: Mapping[int, Path], is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Take the newest `weights` as the trainer's. Reading raises `RunError` once `is_stopped`."""
        self._is_stopped = is_stopped
        self.weights = weights
        self._models: OrderedDict[int, _Model] = OrderedDict()
        logging.disable_progress_bar()

    @property
    def trainer(self) -> int:
        return max(self.weights)

    @property
    def has_routers(self) -> bool:
        return self._model(self.trainer).routers.shape is not None

    @property
    def vocab_size(self) -> int:
        return int(self._model(self.trainer).causal.config.get_text_config().vocab_size)

    def knows(self, versions: Iterable[int]) -> bool:
        """Return True if the weights of all `versions` are in memory, or still on disk."""
        return all(each in self._models or (each in self.weights and self.weights[each].is_dir()) for each in versions)

    def read(self, branch: AuditedBranch) -> ReadBranch:
        """Return the branch's logprobs by all causes that could make a difference to it. Raises `RunError`."""
        versions, rendered = branch.passed_versions, branch.rendered
        is_possible = {
            GapCause.VERSION: versions != [self.trainer],
            GapCause.CACHE: len(versions) > 1,
            GapCause.TEMPLATE: rendered is not None and not np.array_equal(branch.recorded.ids, rendered.ids),
            GapCause.EXPERTS: self.has_routers and branch.recorded.rows is not None,
            GapCause.DTYPE: True,
        }
        possible = [cause for cause, holds in is_possible.items() if holds]
        asked = {params.temperature for params in branch.params if params.temperature}
        factors = sorted({*TEMPERATURES, *asked})
        subsets = chain.from_iterable(combinations(possible, size) for size in range(len(possible) + 1))
        tables = {
            causes: self._read(branch, causes, factors) for causes in {effective(frozenset(each)) for each in subsets}
        }
        return ReadBranch(branch, factors, tables)

    def _read(
        self, branch: AuditedBranch, causes: frozenset[GapCause], factors: Sequence[float]
    ) -> npt.NDArray[np.float32]:
        """Return logprobs [2, factors, tokens] without and with candidates, for each factor of the temperature."""
        if self._is_stopped():
            raise RunError("stopped before its end")
        reading = branch.recorded if GapCause.TEMPLATE in causes or branch.rendered is None else branch.rendered
        with torch.no_grad():
            logits = self._logits(reading, causes)
            wanted = torch.from_numpy(reading.ids[reading.positions].astype(np.int64))[:, None]
            # Logprobs over candidates come after the temperature, others before it.
            own = [(params.temperature or 1.0) if params.sampling_mask else 1.0 for params in branch.params]
            scale, table = torch.tensor(own, dtype=torch.float32)[:, None], []
            for factor in factors:
                scaled = logits / (scale * factor)
                chosen = scaled.gather(1, wanted)[:, 0]
                among = [scaled, _among_candidates(scaled, logits, branch, factor)]
                table.append([(chosen - each.logsumexp(-1)).numpy() for each in among])
        return np.asarray(table, np.float32).swapaxes(0, 1)

    def _logits(self, reading: BranchTokens, causes: frozenset[GapCause]) -> Tensor:
        """Return the logits [tokens, vocabulary] of the audited tokens."""
        dtype = torch.bfloat16 if GapCause.DTYPE in causes else torch.float32
        before, cache = reading.positions - 1, None
        logits, models = torch.empty(before.size, self.vocab_size), dict[int, _Model]()
        with ExitStack() as stack:
            for start, stop, version, is_wanted in self._plan(reading, causes):
                if version not in models:
                    models[version] = self._model(version)
                    stack.enter_context(models[version].computing_in(dtype))
                model, rows = models[version], None
                if GapCause.EXPERTS in causes and reading.rows is not None:
                    is_own = GapCause.VERSION in causes  # the trainer replays all rows, whichever weights chose them
                    rows = reading.rows_of(version, start, stop) if is_own else reading.rows.between(start, stop)
                cache = _crop(cache, start) if GapCause.CACHE in causes else None
                ids = torch.from_numpy(reading.ids[start:stop].astype(np.int64))[None]
                wanted = torch.from_numpy(before[is_wanted] - start)
                told = {"input_ids": ids, "logits_to_keep": wanted, "use_cache": cache is not None}
                with replaying(model.routers, rows, ids.device):
                    logits[torch.from_numpy(is_wanted)] = model.causal(**told, **model.taking(cache)).logits[0].float()
        return logits

    def _plan(
        self, reading: BranchTokens, causes: frozenset[GapCause]
    ) -> Iterator[tuple[int, int, int, npt.NDArray[np.bool_]]]:
        """Return start, stop, version and wanted tokens of each pass: the engine's, or one from the first token on."""
        before = reading.positions - 1
        wanted: dict[int, npt.NDArray[np.bool_]] = {}
        for step in reading.passes:
            version = step.version if GapCause.VERSION in causes else self.trainer
            own = (before >= step.first) & (before < step.stop)
            if GapCause.CACHE in causes:
                yield step.start, step.stop, version, own
            else:
                wanted[version] = wanted.get(version, False) | own
        for version, own in wanted.items():
            if own.any():
                yield 0, int(before[own].max()) + 1, version, own

    def _model(self, version: int) -> _Model:
        if version not in self._models:
            try:
                causal = AutoModelForCausalLM.from_pretrained(
                    self.weights[version], dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
                ).eval()
            except (OSError, ValueError, RuntimeError, SafetensorError) as error:
                raise ModelError(f"cannot load the model in {self.weights[version]}: {error}") from error
            routers = Routers(causal)
            with routers.proving(), torch.no_grad():
                causal(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
            self._models[version] = _Model(causal, routers)
            if len(self._models) > _MODELS:
                self._models.popitem(last=False)
        self._models.move_to_end(version)
        return self._models[version]


def _crop(cache: Any, tokens: int) -> Any:
    if cache is None or not tokens:
        return DynamicCache()
    if (excess := cache.get_seq_length() - tokens) > 0:
        cache.crop(-excess)
    return cache


def _among_candidates(scaled: Tensor, logits: Tensor, branch: AuditedBranch, factor: float) -> Tensor:
    """Return `scaled` with minus infinity where an id was no candidate: as recorded, or by the turn's parameters.

    The reference's own candidates may lack a token that the engine sampled; its row then keeps them all.
    """
    masks = branch.masks
    if masks is None and not any(params.filters_tokens for params in branch.params):
        return scaled
    kept, ids = scaled.clone(), branch.recorded.ids[branch.recorded.positions]
    for row, params in enumerate(branch.params):
        left_out = torch.zeros(kept.shape[1], dtype=torch.bool)
        if masks is not None and masks.states[row] == RowState.PRESENT:
            left_out[:] = True
            candidates = masks.values[masks.offsets[row] : masks.offsets[row + 1]]
            left_out[torch.from_numpy(candidates.astype(np.int64))] = False
        elif params.filters_tokens and params.temperature > 0:
            # The engine drew at the temperature on record, unless it is wrong about that, too.
            used = replace(params, temperature=factor if params.temperature == 1 else params.temperature)
            left_out = filter_logits(logits[row], used).isneginf()
        if not left_out[int(ids[row])]:
            kept[row, left_out] = -torch.inf
    return kept
