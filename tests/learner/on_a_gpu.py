"""Compares packs with their segments alone on a device: `python -m tests.learner.on_a_gpu [cuda|cpu]`.

No machine of the test runs has a GPU, so this is run by hand where one is. It needs torch, transformers and the base
install. Exits with 1 if a figure is beyond its bound.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from harness.training import Segment
from harness.training.learner.learner import LossKind, LossSettings, OptimizerSettings
from harness.training.learner.packed_forward import packed_logprobs
from harness.training.learner.torch_learner import TorchLearner
from tests.learner.test_packed_gradients import HIGH, LOW
from tests.learner.tiny_models import distance, gradient, in_packs, some_segments, tiny_model

FAMILIES: dict[str, dict[str, Any]] = {"LlamaConfig": {}, "MistralConfig": {"sliding_window": 16}, "Qwen3Config": {}}
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
LENGTHS = (129, 40, 517, 2, 300, 64, 1023, 7, 81, 255)
FLOAT32 = 1e-4
"""Most distance of the gradients, relative to their norm, where only the order of sums differs."""
AGAINST_BFLOAT16 = 1.5
"""Most distance of packs to float32, in units of that of segments alone in bfloat16."""


def main(device: str) -> int:
    where = torch.cuda.get_device_name() if device == "cuda" else device
    print(f"torch {torch.__version__} on {where}")
    failed = [name for name, more in FAMILIES.items() if not agrees(name, device, more)]
    if device == "cuda":
        time_packs(device)
    print(f"FAILED: {', '.join(failed)}" if failed else "PASSED")
    return 1 if failed else 0


def agrees(family: str, device: str, more: dict[str, Any]) -> bool:
    """Compare gradients in float32 and bfloat16, and look for tokens that see another segment."""
    model = tiny_model(family, dtype=torch.float32, **SHAPE, initializer_range=0.05, **more)
    segments = some_segments(model, LENGTHS)
    model.to(device)
    exact = of_segments_alone(model, segments, None)
    alone = distance(of_segments_alone(model, segments, torch.bfloat16), exact)
    whole = distance(of_packs(model, segments, None), exact)
    kernel = distance(of_packs(model, segments, torch.bfloat16), exact)
    seen = change_behind_a_border(model, segments)
    print(f"{family:14}  float32 {whole:.1e}  bfloat16 {kernel:.1e}, segments alone {alone:.1e}  seen {seen:.1e}")
    return whole < FLOAT32 and kernel < AGAINST_BFLOAT16 * alone and seen == 0


def of_segments_alone(model: Any, segments: list[Segment], autocast: torch.dtype | None) -> torch.Tensor:
    """Gradient of a pack for each segment, by the model's own attention."""
    learner = new_learner(model, autocast)
    model.set_attn_implementation("eager")
    for segment in segments:
        learner.accumulate(next(iter(in_packs([segment], 1))))
    return gradient(model)


def of_packs(model: Any, segments: list[Segment], autocast: torch.dtype | None) -> torch.Tensor:
    """Gradient of three packs."""
    learner = new_learner(model, autocast)
    for pack in in_packs(segments, 3):
        learner.accumulate(pack)
    return gradient(model)


def new_learner(model: Any, autocast: torch.dtype | None) -> TorchLearner:
    model.zero_grad(set_to_none=True)
    loss = LossSettings(LossKind.CROSS_ENTROPY, LOW, HIGH)
    return TorchLearner(model, loss, OptimizerSettings(), autocast=autocast)


def change_behind_a_border(model: Any, segments: list[Segment]) -> float:
    """Return how much the logprobs of one segment change when the tokens of those beside it do."""
    new_learner(model, torch.bfloat16)
    ids = [segment.ids for segment in segments[:3]]

    def of_the_second(first: np.ndarray, third: np.ndarray) -> torch.Tensor:
        [pack] = in_packs([Segment.of_tokens(each) for each in (first, ids[1], third)], 1)
        start = next(start for start in range(len(pack)) if np.array_equal(pack.ids[start:][: len(ids[1])], ids[1]))
        trained = (pack.logit_positions >= start) & (pack.logit_positions < start + len(ids[1]) - 1)
        with torch.no_grad(), torch.autocast(model.device.type, dtype=torch.bfloat16):
            return packed_logprobs(model, pack)[torch.from_numpy(trained).to(model.device)]

    return float((of_the_second(ids[0], ids[2]) - of_the_second(ids[0][::-1].copy(), ids[2][::-1].copy())).abs().max())


def time_packs(device: str) -> None:
    """Print seconds of a step over 16 segments of 4,096 tokens: the kernel on a pack, and segment by segment."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "head_dim": 64}
    model = tiny_model("Qwen3Config", dtype=torch.float32, **shape, num_hidden_layers=8, num_key_value_heads=4)
    model.to(device)
    segments = [Segment.of_tokens(np.arange(4096) * (7 + number) % 61) for number in range(16)]
    learner = new_learner(model, torch.bfloat16)
    [whole], singles = in_packs(segments, 1), in_packs(segments, 16)
    by_kernel = best_of(lambda: learner.accumulate(whole))
    one_by_one = best_of(lambda: [learner.accumulate(pack) for pack in singles])
    print(f"65,536 tokens: one pack {by_kernel:.3f} s, 16 packs {one_by_one:.3f} s")


def best_of(step: Callable[[], object]) -> float:
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
