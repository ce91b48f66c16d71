"""Whether samples tell the truth about every checkpoint that had to do with them.

Independent of the harness: reads samples as JSON, loads each checkpoint with transformers, runs a plain forward pass in
float32 (no cache, no batch, no engine) over the sample's tokens, and compares

- `rollout_log_probs` of every sampled token with the checkpoint of its behavior version;
- `proximal_logprobs` with the checkpoint of behavior + 1 where the token has met it, else with its behavior values.

    python tests/ground_truth.py samples.jsonl 0=MODEL_DIR 1=CHECKPOINT_DIR 2=CHECKPOINT_DIR
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Json = dict[str, Any]

_BLOCK = 256  # positions; of a vocabulary of 49,152 their logits are 50 MB


@dataclass
class TruthReport:
    """What a comparison has found."""

    sampled: int = 0
    met_next: int = 0
    """Tokens that met their next version."""
    behavior_difference: float = 0.0
    """Largest, over all sampled tokens."""
    proximal_difference: float = 0.0
    """Largest, over the tokens that met their next version."""
    moved: float = 0.0
    """Mean absolute change of a logprob from behavior to proximal: how much a mistake would show."""
    third_states: list[str] = field(default_factory=list)
    """Tokens whose proximal columns are neither the behavior values nor those of the next version."""
    by_version: dict[str, float] = field(default_factory=dict)
    """Largest differences of each column by the version that computed them."""

    def lines(self) -> Iterator[str]:
        """The verdict, to be read."""
        yield f"{self.sampled} sampled tokens, {self.met_next} met their next version"
        yield f"largest difference from the behavior checkpoint: {self.behavior_difference:.2e}"
        yield f"largest difference from the next checkpoint:      {self.proximal_difference:.2e}"
        yield f"a logprob moved by {self.moved:.3f} on average between the two"
        yield f"{len(self.third_states)} tokens in a third state"
        yield "by version: " + ", ".join(f"{key} {value:.1e}" for key, value in sorted(self.by_version.items()))

    def note(self, key: str, difference: float) -> float:
        """Remember a difference; returns it."""
        self.by_version[key] = max(self.by_version.get(key, 0.0), difference)
        return difference


def compare(samples: Sequence[Json], checkpoints: Mapping[int, Path]) -> TruthReport:
    """The verdict on `samples`; `checkpoints` has a folder for every version that sampled or scored a token."""
    truth = true_logprobs(samples, checkpoints)
    verdict = TruthReport()
    moves: list[float] = []
    for number, sample in enumerate(samples):
        start = len(sample["tokens"]) - sample["response_length"]
        for i, behavior in enumerate(sample["behavior_versions"]):
            if behavior < 0:
                continue
            verdict.sampled += 1
            sampled_at, said = sample["rollout_log_probs"][i], sample["proximal_logprobs"][i]
            true = truth[behavior][number][start + i]
            difference = verdict.note(f"behavior {behavior}", abs(sampled_at - true))
            verdict.behavior_difference = max(verdict.behavior_difference, difference)
            if sample["proximal_versions"][i] == behavior + 1:
                verdict.met_next += 1
                next_true = truth[behavior + 1][number][start + i]
                difference = verdict.note(f"proximal {behavior + 1}", abs(said - next_true))
                verdict.proximal_difference = max(verdict.proximal_difference, difference)
                moves.append(abs(next_true - true))
            elif sample["proximal_versions"][i] != behavior or said != sampled_at:
                verdict.third_states.append(f"sample {number}, response token {i}")
    verdict.moved = float(np.mean(moves)) if moves else 0.0
    return verdict


def true_logprobs(samples: Sequence[Json], checkpoints: Mapping[int, Path]) -> dict[int, dict[int, np.ndarray]]:
    """By version and sample, the logprob of each token of the sample under the version's checkpoint; NaN for the first.

    Only of the samples that have to do with the version. Versions of one folder are one model, which is loaded once;
    of several there is one at a time in memory.
    """
    import torch
    from transformers import AutoModelForCausalLM

    truth: dict[int, dict[int, np.ndarray]] = {version: {} for version in checkpoints}
    for folder in dict.fromkeys(checkpoints.values()):
        model = None  # the one before goes before the next one comes
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        versions = {version for version, of in checkpoints.items() if of == folder}
        for number, sample in enumerate(samples):
            concerned = versions.intersection([*sample["behavior_versions"], *sample["proximal_versions"]])
            if concerned:
                found = np.concatenate([[np.nan], logprobs_of(model, sample["tokens"])])
                for version in concerned:
                    truth[version][number] = found
    return truth


def logprobs_of(model: Any, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """The logprob of each of `ids[1:]`, given everything before it, by a causal model of transformers.

    Logits are made block by block: those of a whole sample, and their logarithms, are gigabytes.
    """
    import torch

    tokens = torch.as_tensor(np.asarray(ids, dtype=np.int64))
    found = []
    with torch.inference_mode():
        hidden = model.model(tokens[None], use_cache=False).last_hidden_state[0, :-1]
        for block, wanted in zip(hidden.split(_BLOCK), tokens[1:].split(_BLOCK), strict=True):
            distribution = model.lm_head(block).float().log_softmax(-1)
            found.append(distribution.gather(1, wanted[:, None])[:, 0])
    return torch.cat(found).numpy()


def main(arguments: Sequence[str]) -> int:
    """Print the verdict; 0 when nothing differs by more than 1e-3."""
    path, *pairs = arguments
    checkpoints = {int(version): Path(folder) for version, _, folder in (pair.partition("=") for pair in pairs)}
    samples = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    verdict = compare(samples, checkpoints)
    print("\n".join(verdict.lines()))
    return int(max(verdict.behavior_difference, verdict.proximal_difference) > 1e-3 or bool(verdict.third_states))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
