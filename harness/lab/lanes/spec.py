"""Spec of a lane: the engine, the weights, and options that go to the server unchanged."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

CONTEXT_TOKENS = 8192


class LaneEngine(StrEnum):
    """Engines that can be started here, by their names in `engines.kinds`."""

    SGLANG = "sglang"
    VLLM = "vllm"
    LOCAL = "local"
    """HuggingFace engine of the harness, over SGLang's native API."""

    @property
    def protocol(self) -> str:
        """Word before the address in `--engine`."""
        return LaneEngine.SGLANG.value if self is LaneEngine.LOCAL else self.value


INSTALLED = (LaneEngine.SGLANG, LaneEngine.VLLM)


class Dtype(StrEnum):
    FLOAT32 = "float32"
    """Format in which engines agree on logprobs to five digits."""
    BFLOAT16 = "bfloat16"
    """Format several times faster on a CPU with AMX. Each engine rounds in its own places."""


@dataclass(frozen=True, slots=True)
class LaneSpec:
    engine: LaneEngine
    model_dir: Path
    port: int | None = None
    """Loopback port. None takes a free one."""
    dtype: Dtype = Dtype.FLOAT32
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that override all others."""
    arguments: tuple[str, ...] = ()
    """Options at the end of the command line."""

    @property
    def model_name(self) -> str:
        return self.model_dir.name
