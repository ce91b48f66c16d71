"""`[train]` of a `scenario.toml`: what `harness train` makes of the scenario's rollouts.

The scenario says who plays what; these tables say how many rollouts make a step, which of them are trained, and by
which loss. Groups are the scenario's: `samples_per_prompt` rollouts of one prompt. This module knows the words and
their ranges, and nothing of the rooms that carry them out.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class LossSpec(_Strict):
    """The loss of a trained token, and what the sum over a step is divided by."""

    name: Literal["cross_entropy", "ppo", "grpo", "decoupled_ppo"] = "grpo"
    """`grpo` is `ppo`, a clipped ratio to the policy that sampled, with advantages of groups."""
    normalizer: Literal["tokens", "sequences", "rollouts"] = "tokens"
    """Of the whole step: trained tokens, segments, or rollouts."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio counts down to 1 minus this."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio counts up to 1 plus this."""
    weight_cap: float = Field(default=2.0, gt=0)
    """The most that a token weighs in `decoupled_ppo` because its proximal policy likes it better."""


class OptimizerSpec(_Strict):
    """AdamW, one update per step."""

    learning_rate: float = Field(default=2e-4, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    """The gradient of a step is scaled down to this norm."""


class PackingSpec(_Strict):
    """How segments become packs."""

    length: int = Field(default=4096, ge=2)
    """Tokens of a pack."""
    lookahead: int = Field(default=64, ge=1)
    """Segments that a pack may choose from."""
    too_long: Literal["error", "drop", "cut"] = "error"
    """What becomes of a segment that is longer than a pack."""


class BatchSpec(_Strict):
    """The rollouts of a step as a trainer counts that thinks in batches: their product."""

    per_device: int = Field(default=1, ge=1)
    """Rollouts of one batch."""
    gradient_accumulation: int = Field(default=1, ge=1)
    """Batches of one update."""


class CheckpointSpec(_Strict):
    """Model folders that outlive the run; what `--resume` needs is always kept."""

    every: int = Field(default=0, ge=0)
    """After each so many steps; 0 keeps the last one only."""


class TrainSpec(_Strict):
    """How the scenario is trained on."""

    rollouts_per_step: int = Field(default=0, ge=0)
    """Exactly so many make a step: a multiple of `samples_per_prompt`; 0 takes the product of `batch`."""
    batch: BatchSpec = Field(default_factory=BatchSpec)
    decode_micro_batch: int = Field(default=0, ge=0)
    """Rollouts that are generated at once; 0 takes the scenario's `concurrency`."""
    over_sampling: int = Field(default=0, ge=0)
    """Groups that are begun beyond those that a step wants; what is not whole when the step is complete is ended."""
    partial: Literal["drop", "resume"] = "drop"
    """The fate of rollouts that over-sampling ends: their tokens are dropped, or the next step takes them up."""
    group_filter: Literal["none", "zero_variance"] = "none"
    """Groups that are dropped and made up for: those in which all rewards are equal."""
    most_dropped: int = Field(default=0, ge=0)
    """Groups of a step that a filter may drop; at least 1 with a filter."""
    advantage: Literal["standardized", "reward", "rollout", "turn", "return_to_go"] = "standardized"
    """Of a rollout: the distance of its reward from the mean of its group, in standard deviations; or the reward; or
    an estimator of `samples.credit`, the last two of which credit single turns."""
    discount: float = Field(default=1.0, ge=0, le=1)
    """Of a reward, for each turn that it comes later; in `return_to_go` only."""
    on_failure: Literal["replace", "count"] = "replace"
    """The fate of a rollout that its agent failed: another attempt, or one of the step's that trains nothing."""
    attempts: int = Field(default=3, ge=1)
    """For each place of a group."""
    order: Literal["index", "arrival"] = "index"
    """In which order groups are handed over: by number, the same at any concurrency, or as they end."""
    max_staleness: int = Field(default=0, ge=0)
    """Versions that a trained token may be behind the weights that learn from it."""
    staleness: Literal["mask", "drop"] = "mask"
    """The fate of tokens that are older: they alone are masked, or their samples are dropped."""
    off_scale: Literal["refuse", "allow"] = "refuse"
    """Sampling from another distribution than the logprobs describe: a temperature other than 1, top-p, ..."""
    rollout_deadline_s: float = Field(default=600.0, gt=0)
    """For a rollout, scoring included; one that still runs then is ended and replaced."""
    keep_steps: int = Field(default=2, ge=1)
    """Committed steps whose sessions and samples stay in `run.db`."""
    encoder: str | None = None
    """`FILE:NAME` in the scenario: a class, or a function without arguments, that makes a `SegmentEncoder`."""
    position_rows: int = Field(default=1, ge=1)
    """Rows of position ids that the model takes: 4 for Qwen3-VL, whose first row counts tokens of text."""
    model_program: str | None = None
    """Python file of the scenario that makes the model, in the place of `engine.model`: `FILE OUT --seed SEED`."""
    loss: LossSpec = Field(default_factory=LossSpec)
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec)
    packing: PackingSpec = Field(default_factory=PackingSpec)
    checkpoints: CheckpointSpec = Field(default_factory=CheckpointSpec)

    @property
    def budget(self) -> int:
        """Rollouts that make a step, as they are said or derived."""
        return self.rollouts_per_step or self.batch.per_device * self.batch.gradient_accumulation

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if bool(self.rollouts_per_step) is ("batch" in self.model_fields_set):
            raise ValueError("either rollouts_per_step or batch")
        if self.encoder is not None and not all(self.encoder.partition(":")[::2]):
            raise ValueError(f"encoder as FILE:NAME, and not {self.encoder!r}")
        if self.group_filter == "none" and self.most_dropped:
            raise ValueError("most_dropped = 0 without a group_filter")
        if self.group_filter != "none" and not self.most_dropped:
            raise ValueError("most_dropped of at least 1 beside a group_filter, whose first group would end the run")
        if self.partial == "resume" and not (self.over_sampling and self.max_staleness >= 2):
            raise ValueError(
                "over_sampling of at least 1 and max_staleness of at least 2 beside partial = 'resume', whose groups"
                " begin ahead of their step and are handed over one step later"
            )
        return self
