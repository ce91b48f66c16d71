"""Reference learner: a causal transformers model with AdamW, written to be read. Each rank has all of it."""

import math
import os
import shutil
from dataclasses import asdict, astuple, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Self

from harness.errors import LearnerError

try:
    import torch
    import torch.distributed as dist
    from safetensors import SafetensorError
    from torch import Tensor
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging
except ModuleNotFoundError as error:
    raise LearnerError(f"{error}: the learner needs `pip install 'session-harness[learner]'`") from error

from harness.expert_choice import Routers
from harness.samples.packs import Pack
from harness.training.learner.gradients import BUCKET_BYTES, Gradients
from harness.training.learner.learner import (
    LossSettings,
    LossSums,
    OptimizerSettings,
    Schedule,
    StepReport,
    constant,
    write_folder,
)
from harness.training.learner.losses import Loss, TokenLosses, TrainedTokens, distill, loss_of
from harness.training.learner.packed_forward import logprobs_in, packed_logits, prepare, replaying

_STATE = "learner_state.pt"
_WRITERS_ERRORS = (RuntimeError, ValueError, SafetensorError)
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.gguf")


class TorchLearner:
    """`Learner` of one rank of `torch.distributed`'s default group, or the only one."""

    def __init__(
        self,
        model: Any,
        loss: LossSettings | Loss,
        optimizer: OptimizerSettings,
        *,
        schedule: Schedule = constant,
        autocast: torch.dtype | None = None,
        tokenizer_folder: Path | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Broadcast the weights of rank 0 to all ranks, which wait. Parameters must be all float32, or all float64.

        `autocast` is the precision of matrix products, such as `torch.bfloat16`. `save` copies other files of
        `tokenizer_folder`. Raises `LearnerError` for a model that cannot be trained on packs.
        """
        self._autocast = autocast
        self._routers = Routers(model)
        with self._precision(model), self._routers.proving():
            prepare(model)  # without dropout: a ratio compares policies, not masks
        self.model = model
        """The caller may inspect it between steps."""
        self._loss = loss_of(loss) if isinstance(loss, LossSettings) else loss
        self._teachers = loss.teachers if isinstance(loss, LossSettings) else {}
        self._settings = optimizer
        self._schedule = schedule
        self._tokenizer_folder = tokenizer_folder
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if dist.is_initialized():
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, src=0)
        self._gradients = Gradients(self._parameters, 2 + len(fields(LossSums)), bucket_bytes)
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            weight_decay=optimizer.weight_decay,
        )
        self._step = 0
        self._packs = 0
        self._sums = LossSums()

    @classmethod
    def open(
        cls,
        folder: Path,
        loss: LossSettings | Loss,
        optimizer: OptimizerSettings,
        *,
        schedule: Schedule = constant,
        device: str = "cpu",
        autocast: torch.dtype | None = None,
    ) -> Self:
        """Load the model in `folder` as float32. Raises `LearnerError`."""
        # Leave one core to the event loop and the engine: threads that wait for each other lose to any other process.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
        logging.disable_progress_bar()
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            has_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
            kind = AutoModelForCausalLM if has_causal else AutoModelForImageTextToText
            model = kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise LearnerError(f"cannot load the model in {folder}: {error}") from error
        return cls(model.to(device), loss, optimizer, schedule=schedule, autocast=autocast, tokenizer_folder=folder)

    @property
    def step(self) -> int:
        return self._step

    def accumulate(self, pack: Pack) -> LossSums:
        sums = LossSums()
        if unweighted := pack.teacher_tops.keys() - self._teachers.keys():
            raise LearnerError(
                f"expected a weight for each teacher with top_k, got none for {', '.join(sorted(unweighted))}; state"
                " LossSettings(teachers={NAME: WEIGHT}), as in the segments"
            )
        if pack.loss_mask.any():
            with replaying(self._routers, pack.routed_experts, self.model.device):
                with self._precision(self.model):
                    logits = packed_logits(self.model, pack)
                    logprobs = logprobs_in(pack, logits)
                losses = self._loss(TrainedTokens.of(pack, logprobs))
                losses = losses._replace(loss=losses.loss + distill(self._teachers, pack, logits))
                losses.loss.sum().backward()
            sums = _sum(losses)
        self._packs += 1
        self._sums += sums
        return sums

    def finish_step(self, normalizer: float) -> StepReport:
        try:
            normalizer, packs, *sums = self._gradients.sum_over_ranks([normalizer, self._packs, *astuple(self._sums)])
            learning_rate = self._settings.learning_rate * self._schedule(self._step)
            norm = self._update(normalizer, learning_rate) if LossSums(*sums).trained_tokens else 0.0
        finally:
            self.discard_step()
        self._step += 1
        return StepReport(self._step, int(packs), LossSums(*sums), normalizer, norm, learning_rate)

    def discard_step(self) -> None:
        self._gradients.clear()
        self._packs, self._sums = 0, LossSums()

    def save(self, folder: Path) -> None:
        """Write weights (safetensors), configuration and tokenizer."""
        logging.disable_progress_bar()
        with write_folder(folder, _WRITERS_ERRORS) as unfinished:
            self.model.save_pretrained(unfinished)
            if self._tokenizer_folder is not None:
                for path in self._tokenizer_folder.iterdir():
                    is_weights = any(path.match(pattern) for pattern in _WEIGHTS)
                    if path.is_file() and not is_weights and not (unfinished / path.name).exists():
                        shutil.copyfile(path, unfinished / path.name)

    def save_state(self, folder: Path) -> None:
        state = {
            "step": self._step,
            "settings": asdict(self._settings),
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        with write_folder(folder, _WRITERS_ERRORS) as unfinished:
            torch.save(state, unfinished / _STATE)

    def load_state(self, folder: Path) -> None:
        try:
            state = torch.load(folder / _STATE, map_location="cpu", weights_only=True)
            step, settings, weights, optimizer = (state[key] for key in ("step", "settings", "model", "optimizer"))
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, UnpicklingError) as error:
            raise LearnerError(f"{folder} has no state of this learner: {error}") from error
        if settings != asdict(self._settings):
            raise LearnerError(f"{folder} was trained with {settings}, this learner is set to {asdict(self._settings)}")
        own, saved = _shapes(self.model.state_dict()), _shapes(weights)
        if own != saved:
            name = next(name for name in sorted(own.keys() | saved.keys()) if own.get(name) != saved.get(name))
            raise LearnerError(
                f"{folder} is of another model: {name} has shape {saved.get(name)}, expected {own.get(name)}"
            )
        self.model.load_state_dict(weights)
        self._optimizer.load_state_dict(optimizer)
        self._step = step
        self.discard_step()

    def _precision(self, model: Any) -> torch.autocast:
        return torch.autocast(model.device.type, dtype=self._autocast, enabled=self._autocast is not None)

    def _update(self, normalizer: float, learning_rate: float) -> float:
        if not 0 < normalizer < math.inf:
            raise LearnerError(f"normalizer: expected a positive number, got {normalizer}")
        self._gradients.scale(1 / normalizer)
        norm = self._gradients.norm()
        if not math.isfinite(norm):
            raise LearnerError(
                f"the gradient of step {self._step + 1} is not finite, so it was not applied; look at the advantages,"
                " and at how far the logprobs of its tokens lie from the model's"
            )
        if norm > self._settings.clip_norm:
            self._gradients.scale(self._settings.clip_norm / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        return norm


def _sum(losses: TokenLosses) -> LossSums:
    is_compared = losses.is_compared.to(losses.ratio)
    columns = (
        losses.loss.detach(),
        torch.ones_like(is_compared),
        is_compared,
        losses.ratio * is_compared,
        (losses.ratio - 1 - losses.log_ratio) * is_compared,
        losses.is_clipped * is_compared,
        losses.weight * is_compared,
        losses.is_capped * is_compared,
    )
    # One transfer from the device for all sums.
    return LossSums(*torch.stack([column.sum() for column in columns]).tolist())


def _shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
