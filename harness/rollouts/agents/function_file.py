"""An agent function that stands in a Python file: `play.py:run`.

    async def run(base_url, prompt, request_kwargs, metadata, **kwargs) -> dict | None: ...

`check` reads the file and runs nothing of it: a function that is missing, or does not take what it will be given, is
noticed before anything begins. `load` runs the file in this process, as a module of a package of its own whose path is
the file's folder: `from .game import Game` finds the neighbor, two folders with a `game.py` each never meet, and
`sys.path` stays as it is.

The function is trusted code: it runs in the harness, with all that the harness has in memory (docs/security.md).
"""

import ast
import importlib
import itertools
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.errors import ScenarioError
from harness.rollouts.agents.task import FunctionAgent

GIVEN = ("base_url", "prompt", "request_kwargs", "metadata", "session_id", "api_key")
"""The keyword arguments of every call."""

_loaded = itertools.count()


@dataclass(frozen=True, slots=True)
class FunctionFile:
    """A function in a file."""

    path: Path
    name: str
    """Of an `async def` at the top level of the file."""

    def check(self) -> None:
        """Raise `ScenarioError` unless the file has such a function and it can be called as agents are."""
        try:
            tree = ast.parse(self.path.read_bytes(), filename=self.path.name)
        except FileNotFoundError:
            raise ScenarioError(
                f"expected a file of the scenario, got {self.path.name!r}, which does not exist"
            ) from None
        except (OSError, SyntaxError, ValueError) as error:
            raise ScenarioError(f"expected a Python file, got {self.path.name!r}: {error}") from None
        named = [
            each
            for each in tree.body
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == self.name
        ]
        if not named or not isinstance(named[-1], ast.AsyncFunctionDef):
            got = "a `def` without async" if named else "none"
            raise ScenarioError(f"expected an `async def {self.name}` at the top level of {self.path.name}, got {got}")
        _check_arguments(named[-1].args, f"{self.path.name}:{self.name}")

    def load(self) -> FunctionAgent:
        """The function as an agent; its file is run anew, whatever was loaded before.

        Raises `ScenarioError` when the file cannot be run, or has no such function then.
        """
        return FunctionAgent(f"{self.path.name}:{self.name}", load_named(self.path, self.name))


def load_named(path: Path, name: str) -> Any:
    """What the Python file at `path` calls `name`; the file is run anew. Raises `ScenarioError`."""
    package = ModuleType(f"harness_scenario_{next(_loaded)}")
    package.__path__ = [str(path.parent)]
    sys.modules[package.__name__] = package
    importlib.invalidate_caches()
    try:
        return getattr(importlib.import_module(f"{package.__name__}.{path.stem}"), name)
    except (Exception, SystemExit) as error:
        where = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f" (line {where[-1]})" if where else ""
        raise ScenarioError(f"{path} cannot be loaded: {type(error).__name__}: {error}{line}") from error


def _check_arguments(arguments: ast.arguments, where: str) -> None:
    """Raise `ScenarioError` unless a call with the keywords `GIVEN` fits `arguments`."""
    positional = arguments.posonlyargs + arguments.args
    required = {argument.arg for argument in positional[: len(positional) - len(arguments.defaults)]}
    required |= {
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    }
    by_keyword = {argument.arg for argument in arguments.args + arguments.kwonlyargs}
    asked = sorted(required - (by_keyword & {*GIVEN}))
    if asked:
        raise ScenarioError(f"expected {where} to need no more than {', '.join(GIVEN)}, got {', '.join(asked)}")
    left = [name for name in GIVEN if name not in by_keyword]
    if left and arguments.kwarg is None:
        raise ScenarioError(f"expected {where} to take {', '.join(left)}, or `**kwargs`")
