"""Names of teachers, engines that score sampled tokens: `NAME=ENGINE`.

`ENGINE` is `scripted`, `scripted=FILE` (a script with a rule), `local=FOLDER`, or servers.

A teacher reads the sessions' token ids, or their text if `,tokenizer=FOLDER` follows with another tokenizer. Servers
are tested for the one that counts; the folder of a local one has it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from harness.engines.base import TokenProvider
from harness.engines.connect import EngineName, open_engine
from harness.engines.remote.address import EngineAddress
from harness.engines.remote.served_model import texts_to_compare
from harness.engines.scripted import Script
from harness.errors import ScenarioError
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.tokens.model_family import open_chat_tokenizer
from harness.tokens.tokenizer import Tokenizer

TEACHER_NAME = r"^[a-z0-9][a-z0-9_-]{0,63}$"
_USAGE = "NAME=ENGINE, such as big=sglang=http://127.0.0.1:30000, big=local=FOLDER or rule=scripted"
_TOKENIZER = ",tokenizer="
_FILES = ("local=", "scripted=")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_CONVERSATIONS = 64  # that a teacher reads on with each turn, without encoding them again


class TeachAfter(StrEnum):
    """Time when a teacher scores."""

    TURN = "turn"
    """Each turn, while the agent continues."""
    END = "end"
    """All turns, when their samples are collected."""


@dataclass(frozen=True, slots=True)
class TeacherSpec:
    name: str
    engine: str | Callable[[], TokenProvider]
    """Engine name, or a function that creates a provider; it is called again after a failure."""
    after: TeachAfter = TeachAfter.TURN
    top_k: int = 0
    """Most likely tokens to return per sampled token."""
    tokenizer: Path | None = None
    """Folder with the teacher's tokenizer and chat template; None for the sessions', or a local engine's."""

    @classmethod
    def parse(cls, text: str, after: TeachAfter = TeachAfter.TURN) -> Self:
        """Parse `NAME=ENGINE`. Raises `ScenarioError`."""
        name, _, rest = text.partition("=")
        engine, _, folder = rest.partition(_TOKENIZER)
        if not re.match(TEACHER_NAME, name) or not engine:
            raise ScenarioError(f"teacher: expected {_USAGE}; got {text!r}")
        if engine in ("local", *_FILES):
            kind = engine.removesuffix("=")
            raise ScenarioError(f"teacher {name}: expected a file or folder, as {name}={kind}=PATH")
        if not engine.startswith(_FILES) and EngineName.parse(engine).needs_server:
            raise ScenarioError(f"teacher {name}: expected the address of a server, as in {_USAGE}")
        return cls(name, engine, after, tokenizer=Path(folder).expanduser() if folder else None)

    def file(self, kind: str) -> Path | None:
        """Return the folder of a `local` model, or the script of a `scripted` one."""
        found, _, path = self.engine.partition("=") if isinstance(self.engine, str) else ("", "", "")
        return Path(path).expanduser() if found == kind and path else None

    def check_files(self) -> None:
        """Require its script, or its tokenizer. Raises `ScenarioError`."""
        if script := self.file("scripted"):
            Script.load(script)
        folder = self.tokenizer or self.file("local")
        if folder is not None and not (folder / "tokenizer.json").is_file():
            raise ScenarioError(f"teacher {self.name}: expected a model with tokenizer.json, found none in {folder}")

    def within(self, directory: Path) -> Self:
        """Return the spec with its script's path from `directory`."""
        script = self.file("scripted")
        return replace(self, engine=f"scripted={directory / script}") if script else self

    def open_family(self, tokenizer: Tokenizer) -> ChatTokenizer | None:
        """Return the teacher's chat tokenizer if it is not `tokenizer`, the sessions'. Raises `TokenizerError`."""
        if (folder := self.tokenizer or self.file("local")) is None:
            return None
        own, texts = Tokenizer.load(folder), texts_to_compare(tokenizer)
        if all(own.encode(text) == tokenizer.encode(text) for text in texts):
            return None
        family = open_chat_tokenizer(folder)
        family.tokenizer.remember(_CONVERSATIONS)
        return family

    def open(self, tokenizer: Tokenizer) -> TokenProvider:
        """Create the provider for a teacher with `tokenizer`. Raises `ScenarioError`."""
        if not isinstance(self.engine, str):
            return self.engine()
        folder, script = self.file("local"), self.file("scripted")
        name = "local" if folder else "scripted" if script else self.engine
        return open_engine(name, model_dir=folder, tokenizer=tokenizer, script=script)


def check_teachers(teachers: Sequence[TeacherSpec], *engines: str) -> None:
    """Require distinct names, and servers other than those in `engines`. Raises `ScenarioError`."""
    names, own = [each.name for each in teachers], {url for engine in engines for url in _urls(engine)}
    for each in teachers:
        if names.count(each.name) > 1:
            raise ScenarioError(f"teachers: expected distinct names, got {each.name} twice")
        if isinstance(each.engine, str) and own & _urls(each.engine):
            raise ScenarioError(
                f"teacher {each.name}: expected a server other than the one that samples, got {each.engine};"
                " the proximal logprobs already are the policy's own (docs/weight-updates.md)"
            )


def _urls(engine: str) -> set[tuple[str | None, int]]:
    urls = EngineName.parse(engine).urls if "://" in engine else ()
    parts = [urlsplit(EngineAddress.parse(url).url) for url in urls]
    ports = {"http": 80, "https": 443}
    return {("" if part.hostname in _LOOPBACK else part.hostname, part.port or ports[part.scheme]) for part in parts}
