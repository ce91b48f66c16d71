"""An agent function in a Python file: `play.py:run`.

    async def run(base_url, prompt, request_kwargs, metadata, **kwargs) -> dict | None: ...

`check` parses the file without running it. `load` runs it in this process with all of its rights (docs/security.md).
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

_loaded = itertools.count()


@dataclass(frozen=True, slots=True)
class FunctionFile:
    path: Path
    name: str

    def check(self) -> None:
        """Raise `ScenarioError` unless the file has the function and it accepts `GIVEN`."""
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
        """Run the file again and return its function. Raises `ScenarioError`."""
        return FunctionAgent(f"{self.path.name}:{self.name}", load_named(self.path, self.name))


def load_named(path: Path, name: str) -> Any:
    """Run the file again and return its `name`. Raises `ScenarioError`."""
    # In a package of its own `from .game import Game` finds the neighbor, equal names in two folders never meet, and
    # `sys.path` is unchanged.
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
