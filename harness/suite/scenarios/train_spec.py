"""`[train]` of a `scenario.toml`. A group is `samples_per_prompt` rollouts of one prompt."""

from typing import Literal, Self

from pydantic import Field, model_validator

from harness.suite.scenarios.validation import Strict


class LossSpec(Strict):
    """Token loss and normalizer."""

    name: Literal["cross_entropy", "ppo", "grpo", "decoupled_ppo"] = "grpo"
    """`grpo` is `ppo` (a clipped ratio to the sampling policy) with group advantages."""
    normalizer: Literal["tokens", "sequences", "rollouts"] = "tokens"
    """Divisor of the step's loss: trained tokens, segments or rollouts."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Ratio floor: 1 minus this."""
    clip_high: float = Field(default=0.2, gt=0)
    """Ratio ceiling: 1 plus this."""
    weight_cap: float = Field(default=2.0, gt=0)
    """Cap on a token's proximal-to-behavior weight in `decoupled_ppo`."""


class OptimizerSpec(Strict):
    """AdamW, one update per step."""

    learning_rate: float = Field(default=2e-4, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""


class PackingSpec(Strict):
    """Packing of segments."""

    length: int = Field(default=4096, ge=2)
    """Tokens of a pack."""
    lookahead: int = Field(default=64, ge=1)
    """Segments that a pack may choose from."""
    too_long: Literal["error", "drop", "cut"] = "error"
    """Handling of segments longer than a pack."""


class BatchSpec(Strict):
    """Rollouts of a step, as a product."""

    per_device: int = Field(default=1, ge=1)
    """Rollouts per batch."""
    gradient_accumulation: int = Field(default=1, ge=1)
    """Batches per update."""


class CheckpointSpec(Strict):
    """Model folders to keep; those for `--resume` always stay."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 keeps only the last."""


class TrainSpec(Strict):
    rollouts_per_step: int = Field(default=0, ge=0)
    """Multiple of `samples_per_prompt`; 0 uses the product of `batch`."""
    batch: BatchSpec | None = None
    decode_micro_batch: int = Field(default=0, ge=0)
    """Rollouts at once; 0 uses `concurrency`."""
    over_sampling: int = Field(default=0, ge=0)
    """Groups begun beyond a step's need; incomplete ones end with it."""
    partial: Literal["drop", "resume"] = "drop"
    """Rollouts that over-sampling ends: drop, or resume in the next step."""
    group_filter: Literal["none", "zero_variance"] = "none"
    """`zero_variance` drops and replaces groups with equal rewards."""
    most_dropped: int = Field(default=0, ge=0)
    """Groups per step that the filter may drop; at least 1 with a filter."""
    advantage: Literal["standardized", "reward", "rollout", "turn", "return_to_go", "value"] = "standardized"
    """`standardized` (reward minus group mean, in standard deviations), `reward`, or an estimator of `samples.credit`.
    `turn`, `return_to_go` and `value` credit single turns.
    """
    value_forks: int = Field(default=0, ge=0)
    """Forks of each turn but the first, whose mean reward is the turn's value; for `value` only."""
    discount: float = Field(default=1.0, ge=0, le=1)
    """Discount of rewards per turn, in `return_to_go` only."""
    teachers: dict[str, float] = Field(default_factory=dict)
    """Weight of each teacher: this times the teacher's logprob minus the own one is added to a token's advantage, or
    with `top_k` the divergence to the loss.
    """
    on_failure: Literal["replace", "count"] = "replace"
    """After an agent failure: replace, or count without training."""
    attempts: int = Field(default=3, ge=1)
    """Attempts per place of a group."""
    order: Literal["index", "arrival"] = "index"
    """By number (the same at any concurrency), or as groups end."""
    max_staleness: int = Field(default=0, ge=0)
    """Versions that trained tokens may lag behind."""
    staleness: Literal["mask", "drop"] = "mask"
    """Older tokens: mask them, or drop their samples."""
    off_scale: Literal["refuse", "allow"] = "refuse"
    """Sampling that logprobs do not describe: top-p, temperature other than 1."""
    rollout_deadline_s: float = Field(default=600.0, gt=0)
    """Seconds, scoring included; late rollouts are replaced."""
    keep_steps: int = Field(default=2, ge=1)
    """Committed steps to keep in `run.db`."""
    encoder: str | None = None
    """`FILE:NAME` of a class or function that makes a `SegmentEncoder`."""
    position_rows: int = Field(default=1, ge=1)
    """Rows of position ids: 4 for Qwen3-VL, the first for text tokens."""
    model_program: str | None = None
    """Python file that makes the model: `FILE OUT --seed SEED`."""
    loss: LossSpec = Field(default_factory=LossSpec)
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec)
    packing: PackingSpec = Field(default_factory=PackingSpec)
    checkpoints: CheckpointSpec = Field(default_factory=CheckpointSpec)

    @property
    def budget(self) -> int:
        """Rollouts per step."""
        batch = self.batch or BatchSpec(per_device=self.rollouts_per_step)
        return batch.per_device * batch.gradient_accumulation

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if bool(self.rollouts_per_step) is (self.batch is not None):
            raise ValueError("either rollouts_per_step or batch")
        if (self.advantage == "value") is not bool(self.value_forks):
            raise ValueError('value_forks of at least 1 with advantage = "value", and of 0 with others')
        if self.encoder is not None and not all(self.encoder.partition(":")[::2]):
            raise ValueError(f"encoder as FILE:NAME, and not {self.encoder!r}")
        if self.group_filter == "none" and self.most_dropped:
            raise ValueError("most_dropped = 0 without a group_filter")
        if self.group_filter != "none" and not self.most_dropped:
            raise ValueError("most_dropped of at least 1 with a group_filter, whose first group would end the run")
        if self.partial == "resume" and not (self.over_sampling and self.max_staleness >= 2):
            raise ValueError(
                "over_sampling of at least 1 and max_staleness of at least 2 with partial = 'resume', whose groups"
                " begin ahead of their step and are handed over one step later"
            )
        return self
