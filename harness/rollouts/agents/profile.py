"""An agent's `profile.toml`: data to install, configure and start an unmodified agent.

`${NAME}` in a command, variable or file is a variable that `harness env` prints. The server never learns which agent it
serves.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from harness.decoding import convert
from harness.dialects.dialect import DIALECTS
from harness.errors import ScenarioError
from harness.samples.delivery import Selection
from harness.types import Json

if TYPE_CHECKING:
    from harness.rollouts.sandboxes.spec import SandboxSpec

PROFILE_FILE = "profile.toml"
SCHEMA_VERSION = 1

_REFERENCE = re.compile(r"\$(\$?)\{(\w+)\}")


class Installer(StrEnum):
    """Package registry, and the lock file that pins every package."""

    PYTHON = "python"
    NODE = "node"
    """Runs on the harness's own Node."""
    NONE = "none"
    """The command exists already, as without `[install]`."""

    @property
    def lock_file(self) -> str:
        return {Installer.PYTHON: "requirements.txt", Installer.NODE: "package-lock.json"}[self]


class InstallSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[install]`: the agent's package."""

    kind: Installer
    package: str = ""
    programs: dict[str, str] = msgspec.field(default_factory=dict)
    """Programs that the package's install script, which does not run, would link: patterns below `node_modules`, whose
    first match in alphabetical order counts (packages differ by platform).
    """


class SessionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[session]`: defaults of the agent's sessions."""

    matching: tuple[str, ...] = ()
    """Changes the agent makes to its history; see `tokens.matching`."""
    selection: Selection = Selection.ALL
    template_variables: dict[str, Any] = msgspec.field(default_factory=dict)

    def to_json(self) -> Json:
        """Return the fields for `POST /sessions`."""
        variables = {"template_variables": self.template_variables} if self.template_variables else {}
        return {"matching": list(self.matching), "selection": str(self.selection), **variables}


class ClientFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[client]`: behavior of the agent's client, for readers and tests."""

    streams: bool = False
    rewrites_history: bool = False
    """True if `matching` cannot undo its changes. Each turn is then its own branch."""
    idle_timeout_s: float | None = None
    """Seconds without a byte until the client gives up; None if unlimited or unknown."""
    side_calls: str = ""
    """Model calls besides the conversation, in words."""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema_version: Literal[1]
    description: str
    dialect: str
    """Name of a dialect in `DIALECTS`."""
    command: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """Program and arguments. Programs of the agent's environment are found by name."""
    install: InstallSpec | None = None
    """None if the command exists already."""
    version_command: tuple[str, ...] = ()
    env: dict[str, str] = msgspec.field(default_factory=dict)
    """Variables that override every agent's."""
    files: dict[str, str] = msgspec.field(default_factory=dict)
    """Files of each rollout's own home directory, by path."""
    setup: tuple[str, ...] = ()
    """Command that runs before the agent."""
    cwd: str = ""
    """The agent's directory, relative to the rollout's."""
    workdir_files: tuple[str, ...] = ()
    """Files and folders next to the profile, copied into the rollout's directory."""
    key_in_environment: bool = True
    """False if only its files may hold the session's key and address, which child processes then do not inherit."""
    sandbox: dict[str, Any] = msgspec.field(default_factory=dict)
    """Table of a `SandboxSpec`, for rollouts that name none."""
    session: SessionSpec = SessionSpec()
    client: ClientFacts = ClientFacts()


@dataclass(frozen=True, slots=True)
class AgentProfile:
    path: Path
    spec: Profile
    version: str
    """Locked version of the package; empty if none is installed."""

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def name(self) -> str:
        """Name of the folder, or of a file not called `profile.toml`."""
        return self.folder.name if self.path.name == PROFILE_FILE else self.path.stem

    @property
    def install(self) -> InstallSpec:
        assert self.spec.install is not None
        return self.spec.install

    @property
    def lock_file(self) -> Path:
        return self.folder / self.install.kind.lock_file

    @property
    def sandbox(self) -> "SandboxSpec":
        """The sandbox of its rollouts. Raises `ScenarioError`."""
        from pydantic import ValidationError

        from harness.rollouts.sandboxes.spec import SandboxSpec

        try:
            return SandboxSpec(**self.spec.sandbox)
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, ("sandbox", *problem["loc"])))
            raise ScenarioError(f"{self.path}: {place}: {problem['msg']}") from error

    @property
    def is_served(self) -> bool:
        """True if this version's servers speak its dialect."""
        return any(dialect.name == self.spec.dialect for dialect in DIALECTS)


def load_profile(path: Path) -> AgentProfile:
    """Load a profile file, or a folder's `profile.toml`. Raises `ScenarioError`."""
    path = path / PROFILE_FILE if path.is_dir() else path
    try:
        spec = convert(tomllib.loads(path.read_text(encoding="utf-8")), Profile)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ScenarioError(f"{path}: {error}") from error
    for name in spec.files:
        if not is_inside(name):
            raise ScenarioError(f"{path}: files: expected a path inside the home directory, got {name!r}")
    if not is_inside(spec.cwd):
        raise ScenarioError(f"{path}: cwd: expected a path inside the rollout's directory, got {spec.cwd!r}")
    files_beside(path.parent, spec.workdir_files, f"{path}: workdir_files")
    _ = AgentProfile(path, spec, "").sandbox  # raises for a wrong table
    if spec.install is not None and (spec.install.kind is Installer.NONE) == bool(spec.install.package):
        expected = "no package" if spec.install.package else "the name of a package"
        raise ScenarioError(f"{path}: install.package: expected {expected} with kind {str(spec.install.kind)!r}")
    if spec.install is None or spec.install.kind is Installer.NONE:
        return AgentProfile(path, msgspec.structs.replace(spec, install=None), "")
    if not spec.version_command:
        raise ScenarioError(f"{path}: version_command: expected a command with [install], got none")
    lock = path.parent / spec.install.kind.lock_file
    try:
        version = _locked_version(spec.install, lock.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ScenarioError(f"{lock}: expected a version of {spec.install.package!r}: {error}") from error
    return AgentProfile(path, spec, version)


def is_inside(path: str) -> bool:
    """Return True if `path` is relative and leaves no directory."""
    return not Path(path).is_absolute() and ".." not in Path(path).parts


def files_beside(folder: Path, names: Sequence[str], key: str) -> dict[str, Path]:
    """Return the absolute paths of files and folders by `names` relative to `folder`.

    Raises `ScenarioError` naming `key` for a path that leaves it or does not exist.
    """
    for name in names:
        if not is_inside(name) or not (folder / name).exists():
            problem = "does not exist" if is_inside(name) else "leaves it"
            raise ScenarioError(f"{key}: expected a file or folder in {folder}, got {name!r}, which {problem}")
    return {name: (folder / name).absolute() for name in names}


def expand(text: str, variables: Mapping[str, str], *, escaped: bool = False) -> str:
    """Replace each `${NAME}`, and `$${` by `${`. `escaped` fits into JSON and TOML. Raises `ValueError`."""

    def value(reference: re.Match[str]) -> str:
        is_literal, name = reference.groups()
        if is_literal:
            return f"${{{name}}}"
        if name not in variables:
            raise ValueError(f"${{{name}}}: expected a variable of the agent's environment, got none")
        return json.dumps(variables[name])[1:-1] if escaped else variables[name]

    return _REFERENCE.sub(value, text)


def literal(text: str) -> str:
    """Escape `text` so that `expand` restores it."""
    return _REFERENCE.sub(lambda reference: f"${reference[0]}", text)


def closest(name: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown `name`."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


def _locked_version(install: InstallSpec, lock: str) -> str:
    if install.kind is Installer.NODE:
        return str(json.loads(lock)["packages"][f"node_modules/{install.package}"]["version"])
    found = re.search(rf"^{re.escape(install.package)}==([^\s;]+)", lock, flags=re.MULTILINE)
    if found is None:
        raise ValueError(f"no line {install.package}==VERSION")
    return found[1]
