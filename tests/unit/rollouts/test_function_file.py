"""A function of a scenario's file: looked at without running it, loaded without touching anything else."""

import sys
from pathlib import Path

import pytest

from harness.errors import ScenarioError
from harness.rollouts.agents.function import FunctionFile

RIGHT = "async def run(base_url, prompt, request_kwargs, metadata, **kwargs):\n    return {'said': prompt}\n"


def _file(folder: Path, source: str, name: str = "play.py") -> FunctionFile:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(source)
    return FunctionFile(folder / name, "run")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            "def run(**kwargs): ...",
            "expected an `async def run` at the top level of play.py, got a `def` without async",
        ),
        ("async def play(**kwargs): ...", "expected an `async def run` at the top level of play.py, got none"),
        ("if True:\n    async def run(**kwargs): ...", "got none"),
        ("async def run(", "expected a Python file, got 'play.py'"),
        ("\0", "expected a Python file, got 'play.py'"),
        (
            "async def run(base_url, prompt): ...",
            "to take request_kwargs, metadata, session_id, api_key, or `**kwargs`",
        ),
        ("async def run(base_url, /, **kwargs): ...", "expected play.py:run to need no more than base_url, prompt,"),
        ("async def run(tools, **kwargs): ...", "got tools"),
        ("async def run(*, tools, **kwargs): ...", "got tools"),
    ],
)
def test_a_function_that_cannot_be_called_is_noticed_unseen(tmp_path: Path, source: str, problem: str):
    file = _file(tmp_path, f"raise SystemExit\n{source}")

    with pytest.raises(ScenarioError) as caught:
        file.check()

    assert problem in caught.value.message


@pytest.mark.parametrize(
    "arguments",
    [
        "base_url, prompt, request_kwargs, metadata, **kwargs",
        "base_url, prompt, request_kwargs, metadata, session_id, api_key, retries=3",
        "*, prompt, temperature=1.0, **rest",
        "**given",
    ],
)
def test_every_way_to_take_what_is_given_is_right(tmp_path: Path, arguments: str):
    _file(tmp_path, f"async def run({arguments}): ...").check()


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    """In the words that other files of a scenario get."""
    with pytest.raises(ScenarioError, match=r"expected a file of the scenario, got 'play.py', which does not exist"):
        FunctionFile(tmp_path / "play.py", "run").check()


async def test_neighbors_are_those_of_the_own_folder(tmp_path: Path):
    """Two folders with a `game.py` each do not meet, and the interpreter's path stays as it is."""
    path, said = list(sys.path), []
    for name in ("a", "b"):
        file = _file(tmp_path / name, "from .game import WHO\nasync def run(**kwargs):\n    return {'who': WHO}\n")
        (tmp_path / name / "game.py").write_text(f"WHO = {name!r}\n")
        said.append(await file.load().run())

    assert said == [{"who": "a"}, {"who": "b"}]
    assert sys.path == path
    assert "game" not in sys.modules


async def test_a_file_is_run_anew_each_time(tmp_path: Path):
    """What an earlier run left in its globals is not there any more."""
    file = _file(tmp_path, "calls = []\nasync def run(**kwargs):\n    calls.append(1)\n    return {'n': len(calls)}\n")

    assert [await file.load().run() for _ in range(2)] == [{"n": 1}, {"n": 1}]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            "\nimport no_such_module_here\n" + RIGHT,
            "ModuleNotFoundError: No module named 'no_such_module_here' (line 2)",
        ),
        ("raise SystemExit(3)\n" + RIGHT, "SystemExit: 3 (line 1)"),
        (RIGHT + "del run\n", "AttributeError: "),
    ],
)
def test_a_file_that_does_not_run_is_one_error(tmp_path: Path, source: str, problem: str):
    """With the line that raised; it ends no process."""
    file = _file(tmp_path, source)
    file.check()

    with pytest.raises(ScenarioError) as caught:
        file.load()

    assert problem in caught.value.message
    assert str(file.path) in caught.value.message
