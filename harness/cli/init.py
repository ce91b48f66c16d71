"""`harness init`: copy the bundled scenario `starter`, which runs as it is."""

import re
import shutil
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from harness.cli import options, output
from harness.errors import RunError

_Directory = Annotated[Path, typer.Argument(metavar="[DIR]", help="New or empty folder.", show_default=False)]

_STARTER = "starter"
_SCRIPT_FILE = "script.toml"


def init(directory: _Directory = Path(), *, as_json: options.Json = False) -> None:
    """Write a scenario with an agent and a check, which runs at once: no model, no download.

    Exit codes: 0 written, 4 the folder is not empty, 6 it cannot be written.

    Example: `harness init my-task`, then `harness run my-task`
    """
    import msgspec

    from harness.machine.disk import disk_failures
    from harness.rollouts.agents.programs import bundled_directory
    from harness.suite.scenarios.folder import SCENARIO_FILE
    from harness.suite.scenarios.schemas import name_schema, schema_file, schema_of

    source = bundled_directory("scenarios") / _STARTER
    with disk_failures(directory):
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise RunError(f"{directory} exists and is not empty: choose another folder")
        directory.mkdir(parents=True, exist_ok=True)
        files = sorted(path for path in source.iterdir() if path.is_file() and path.name != SCENARIO_FILE)
        for file in files:
            shutil.copyfile(file, directory / file.name)
        script = directory / _SCRIPT_FILE
        script.write_text(name_schema("script", script.read_text(encoding="utf-8")), encoding="utf-8")
        for kind in ("scenario", "script"):
            text = msgspec.json.format(msgspec.json.encode(schema_of(kind)), indent=2).decode()
            (directory / schema_file(kind)).write_text(f"{text}\n", encoding="utf-8")
        # Last, because it makes the folder a scenario. It takes the folder's name, by which a suite identifies it.
        text = (source / SCENARIO_FILE).read_text(encoding="utf-8")
        name = directory.resolve().name
        if re.fullmatch("[a-z0-9][a-z0-9_-]*", name):
            text = text.replace(f'name = "{_STARTER}"', f'name = "{name}"', 1)
        (directory / SCENARIO_FILE).write_text(name_schema("scenario", text), encoding="utf-8")
    names = sorted(path.name for path in directory.iterdir())
    said = f"{directory}: {', '.join(names)}\nrun it with: harness run {quote(str(directory))}"
    output.print_result({"directory": str(directory.resolve()), "files": names}, said, as_json=as_json)
