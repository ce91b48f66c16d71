"""The wish for a lane: which engine, which weights, and what is handed through to the server untouched."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

CONTEXT_TOKENS = 8192
"""A lane serves contexts up to this length, or up to what the model can; its KV cache holds several of them."""


class LaneEngine(StrEnum):
    """Engines that can be started here, by their names in `engines.kinds`; `commands` says how."""

    SGLANG = "sglang"
    VLLM = "vllm"
    LOCAL = "local"
    """The HuggingFace engine of the harness, in the environment of the harness, over SGLang's native wire."""

    @property
    def protocol(self) -> str:
        """The word before its address after `--engine`."""
        return LaneEngine.SGLANG.value if self is LaneEngine.LOCAL else self.value


INSTALLED = (LaneEngine.SGLANG, LaneEngine.VLLM)
"""The engines of others: each is installed in an environment of its own."""


class Dtype(StrEnum):
    """The number format in which the weights are computed."""

    FLOAT32 = "float32"
    """The engines agree on logprobs to five digits."""
    BFLOAT16 = "bfloat16"
    """Several times faster on a CPU with AMX; each engine rounds in its own places."""


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """A server to be started."""

    engine: LaneEngine
    model_dir: Path
    """HuggingFace folder."""
    port: int | None = None
    """On the loopback interface; None takes a free one."""
    dtype: Dtype = Dtype.FLOAT32
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the server, over everything else."""
    arguments: tuple[str, ...] = ()
    """Added to the command line of the server, at its end."""

    @property
    def model_name(self) -> str:
        """The name that the server gives its model: that of the folder."""
        return self.model_dir.name
