"""Sandbox of an agent: `[agent.sandbox]` of a scenario."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from harness.rollouts.sandboxes.sandbox import BWRAP, CONTAINERS, NONE

_KINDS = (NONE, BWRAP, *CONTAINERS)


@dataclass(frozen=True, slots=True)
class Mount:
    """Path of this machine in a box."""

    source: Path
    target: str
    is_writable: bool = False


class SandboxSpec(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    kind: str = NONE
    """`none`, `bwrap`, `podman`, `docker`, or `MODULE:FACTORY` of a plug-in."""
    image: str | None = None
    """Image of a container, which needs one."""
    mounts: tuple[str, ...] = Field(default=(), strict=False)
    """Further paths: `SOURCE[:TARGET][:rw]`, absolute, read-only unless `rw`."""
    network: bool = False
    """Network of this machine. Without it the agent reaches its session alone."""
    cpus: float | None = Field(default=None, gt=0, strict=False)
    """Processors at one time."""
    memory_mb: int | None = Field(default=None, ge=16)
    """Memory of all its processes."""
    pids: int | None = Field(default=None, ge=8)
    """Processes and threads at one time."""
    user: str | None = None
    """User: `UID[:GID]`, or a name of the image."""

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        module, _, factory = kind.partition(":")
        if kind not in _KINDS and not (factory.isidentifier() and all(map(str.isidentifier, module.split(".")))):
            raise ValueError(f"{', '.join(_KINDS)} or MODULE:FACTORY")
        return kind

    @field_validator("mounts")
    @classmethod
    def _are_mounts(cls, mounts: tuple[str, ...]) -> tuple[str, ...]:
        for text in mounts:
            mount = parse_mount(text)
            # A `..` would name another place than the one that is read here, and a comma ends a value for containers.
            for path in (str(mount.source), mount.target):
                if not path.startswith("/") or ".." in path.split("/") or "," in path or ":" in path:
                    raise ValueError(f"SOURCE[:TARGET][:rw] with absolute paths without `..`, got {text!r}")
        return mounts

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if self.kind == BWRAP:
            if self.image is not None:
                raise ValueError("no image for bwrap, which shows this machine's system")
            if self.user is not None and not all(map(str.isdecimal, self.user.split(":", 1))):
                raise ValueError(f"UID[:GID] as user for bwrap, got {self.user!r}")
        if self.kind == NONE and self.model_dump(exclude_defaults=True):
            raise ValueError("a kind with the other keys: bwrap, podman, docker")
        return self

    @property
    def shown(self) -> tuple[Mount, ...]:
        return tuple(map(parse_mount, self.mounts))


def parse_mount(text: str) -> Mount:
    """Parse `SOURCE[:TARGET][:rw]`."""
    path = text.removesuffix(":rw")
    source, _, target = path.partition(":")
    return Mount(Path(source), target or source, text.endswith(":rw"))
