"""Settings."""

from dataclasses import dataclass, field


@dataclass
class GenerationHyperparameters:
    """How to sample."""

    n_samples: int = field(default=1)
    max_new_tokens: int = field(default=16384)
    min_new_tokens: int = field(default=0)
    max_tokens: int = field(default=32768)
    greedy: bool = field(default=False)
    top_p: float = field(default=1.0)
    top_k: int = field(default=int(1e8))
    temperature: float = field(default=1.0)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = field(default=False)
    stop: list[str] | None = field(default=None)
    frequency_penalty: float = field(default=0.0)
    use_beam_search: bool = field(default=False)
