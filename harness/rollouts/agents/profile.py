"""What stands in an agent's `profile.toml`: how an agent that nobody rewrites is installed, configured and started.

A profile is data. It names the package whose version the lock file beside it pins, the command, the variables and the
files by which the agent finds its session, and what its sessions have to know about it. `${NAME}` in a command, a
variable or a file stands for a variable of the agent's environment, so that everything has one vocabulary: what
`harness env` prints. Nothing here is specific to one agent, and the server never learns which one it serves.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from harness.dialects.dialect import DIALECTS
from harness.errors import ScenarioError
from harness.samples.delivery import Selection
from harness.types import Json

PROFILE_FILE = "profile.toml"
SCHEMA_VERSION = 1

_REFERENCE = re.compile(r"\$(\$?)\{(\w+)\}")


class Installer(StrEnum):
    """Where an agent comes from."""

    PYTHON = "python"
    """The package index; `requirements.txt` pins every package."""
    NODE = "node"
    """The npm registry; `package-lock.json` pins every package. It runs on a Node of the harness's own."""

    @property
    def lock_file(self) -> str:
        """The file beside the profile that pins what is installed."""
        return {Installer.PYTHON: "requirements.txt", Installer.NODE: "package-lock.json"}[self]


class InstallSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[install]`: the package that is the agent."""

    kind: Installer
    package: str
    programs: dict[str, str] = msgspec.field(default_factory=dict)
    """Programs that the package's own install script would have put in place, which does not run: where each is below
    `node_modules`, as a pattern whose first match in alphabetical order counts (packages differ by platform)."""


class SessionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[session]`: what the sessions of the agent are created with, unless a task says otherwise."""

    matching: tuple[str, ...] = ()
    """See `tokens.matching`: the differences that the agent makes when it sends its history back."""
    selection: Selection = Selection.ALL
    template_variables: dict[str, Any] = msgspec.field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking`."""

    def to_json(self) -> Json:
        """The part of the body of `POST /sessions`."""
        variables = {"template_variables": self.template_variables} if self.template_variables else {}
        return {"matching": list(self.matching), "selection": str(self.selection), **variables}


class ClientFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[client]`: how the agent's client behaves, for the reader and for tests."""

    streams: bool = False
    """It asks for streamed answers."""
    rewrites_history: bool = False
    """It sends its history back as something else, whatever `matching` says: each turn is a branch of its own."""
    idle_timeout_s: float | None = None
    """It gives up after so long without a byte; None where it has no such limit or nobody knows one."""
    side_calls: str = ""
    """What it asks beside the conversation, in words."""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `profile.toml`."""

    schema_version: Literal[1]
    description: str
    """One sentence for the reader of `harness agent list`."""
    dialect: str
    """By its name among `DIALECTS`."""
    command: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """Program and arguments; programs of the agent's own environment are found by their names."""
    install: InstallSpec | None = None
    """None: the command is there already."""
    version_command: tuple[str, ...] = ()
    """Prints the version of the agent; `harness agent doctor` runs it."""
    env: dict[str, str] = msgspec.field(default_factory=dict)
    """Variables of the agent, over those that every agent gets."""
    files: dict[str, str] = msgspec.field(default_factory=dict)
    """Files in the home directory that each rollout has of its own, by their paths in it."""
    key_in_environment: bool = True
    """False: its files have the key and the address of its session, and no program that it runs inherits them."""
    session: SessionSpec = SessionSpec()
    client: ClientFacts = ClientFacts()


@dataclass(frozen=True, slots=True)
class AgentProfile:
    """A profile and the file that it stands in."""

    path: Path
    spec: Profile
    version: str
    """Of the agent's package, as the lock file has it; empty where nothing is installed."""

    @property
    def folder(self) -> Path:
        """The folder of the file."""
        return self.path.parent

    @property
    def name(self) -> str:
        """The name of its folder, or of a file that is called something else than `profile.toml`."""
        return self.folder.name if self.path.name == PROFILE_FILE else self.path.stem

    @property
    def install(self) -> InstallSpec:
        """The package of an agent that has one."""
        assert self.spec.install is not None
        return self.spec.install

    @property
    def lock_file(self) -> Path:
        """The file that pins what is installed."""
        return self.folder / self.install.kind.lock_file

    @property
    def is_served(self) -> bool:
        """Whether session servers of this version speak its dialect."""
        return any(dialect.name == self.spec.dialect for dialect in DIALECTS)


def load_profile(path: Path) -> AgentProfile:
    """The profile at `path`, a file or the folder of a `profile.toml`.

    Raises `ScenarioError` naming the file and the key.
    """
    path = path / PROFILE_FILE if path.is_dir() else path
    try:
        spec = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Profile)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ScenarioError(f"{path}: {error}") from error
    for name in spec.files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ScenarioError(f"{path}: files: expected a path inside the home directory, got {name!r}")
    if spec.install is None:
        return AgentProfile(path, spec, "")
    if not spec.version_command:
        raise ScenarioError(f"{path}: version_command: expected a command beside [install], got none")
    lock = path.parent / spec.install.kind.lock_file
    try:
        version = _locked_version(spec.install, lock.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ScenarioError(f"{lock}: expected a version of {spec.install.package!r}: {error}") from error
    return AgentProfile(path, spec, version)


def expand(text: str, variables: Mapping[str, str], *, escaped: bool = False) -> str:
    """`text` with every `${NAME}` replaced; `escaped` values may stand in a string of JSON or TOML. `$${` gives `${`.

    Raises `ValueError` naming a variable that is not there.
    """

    def value(reference: re.Match[str]) -> str:
        is_literal, name = reference.groups()
        if is_literal:
            return f"${{{name}}}"
        if name not in variables:
            raise ValueError(f"${{{name}}}: expected a variable of the agent's environment, and there is none")
        return json.dumps(variables[name])[1:-1] if escaped else variables[name]

    return _REFERENCE.sub(value, text)


def literal(text: str) -> str:
    """What `expand` makes `text` of."""
    return _REFERENCE.sub(lambda reference: f"${reference[0]}", text)


def closest(name: str, known: Sequence[str]) -> str:
    """The end of a message about a `name` that nobody knows."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"


def _locked_version(install: InstallSpec, lock: str) -> str:
    if install.kind is Installer.NODE:
        return str(json.loads(lock)["packages"][f"node_modules/{install.package}"]["version"])
    found = re.search(rf"^{re.escape(install.package)}==([^\s;]+)", lock, flags=re.MULTILINE)
    if found is None:
        raise ValueError(f"no line {install.package}==VERSION")
    return found[1]
