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
