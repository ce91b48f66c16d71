"""What goes into a generate function and comes out of it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GenerateFnInput:
    """One sample to generate for."""

    state: Any
    sample: Any
    sampling_params: dict[str, Any]
    evaluation: bool

    @property
    def args(self):
        return self.state.args


@dataclass(frozen=True)
class GenerateFnOutput:
    """The sample, or several."""

    samples: Any


@dataclass(frozen=True)
class RolloutFnConstructorInput:
    """What a rollout function is made of."""

    args: Any
    data_source: Any


@dataclass(frozen=True)
class RolloutFnTrainInput:
    """The step to make."""

    rollout_id: int
    weight_version: int | None = None


@dataclass
class RolloutFnTrainOutput:
    """The groups of a step."""

    samples: list[list[Any]]
    metrics: dict[str, Any] = None
