"""The docs say what the code does."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from starlette.routing import Route

import harness
from harness import errors
from harness.engines.scripted import ScriptedEngine
from harness.errors import HarnessError
from harness.server.app import SessionServer
from harness.server.store.base import MemoryStore
from harness.server.telemetry.metrics import ServerMetrics
from harness.sessions.lifecycle import TRANSITIONS, Command, Phase
from harness.turn_ends import TURN_ENDS
from tests.builders import toy_template, toy_tokenizer, turn_service
from tests.checkout import ROOT

PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    ROOT / "agents/README.md",
    *(ROOT / "examples").glob("*/README.md"),
]


def _doc(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_the_lifecycle_table_in_the_docs_is_the_one_in_force() -> None:
    """Readers of docs/architecture.md see the table the code obeys."""
    rows = re.findall(r"^\| (open|closing|ended|closed) \| (.+?) \|$", _doc("architecture.md"), flags=re.MULTILINE)
    documented = {
        (Phase(phase), command): "" if cell.startswith("refused") else cell
        for phase, cells in rows
        for command, cell in zip(Command, cells.split(" | "), strict=True)
    }
    in_force = {(phase, command): str(TRANSITIONS.get((phase, command), "")) for phase in Phase for command in Command}
    assert documented == in_force


def test_the_table_of_ends_in_the_docs_is_the_one_in_force() -> None:
    """Whoever reads why a turn ended finds there what that means."""
    table = _doc("architecture.md").partition("### Why a turn ended")[2].partition("\n#")[0]
    documented = re.findall(r"^- `(\w+)` \((.+)\): ", table, flags=re.MULTILINE)
    in_force = []
    for end, rule in TURN_ENDS.items():
        early = f"{rule.unsampled} before its first token" if rule.unsampled != rule.status else ""
        facts = [rule.status, early, "waits" * rule.waits, f"`{rule.finish_reason}`" if rule.finish_reason else ""]
        in_force.append((str(end), ", ".join(filter(None, facts))))
    assert documented == in_force


def test_every_error_code_is_documented() -> None:
    """docs/errors.md lists each code with its status."""
    classes = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, HarnessError)]
    documented = {*re.findall(r"^- `\w+` `(\w+)`, (\d+), ", _doc("errors.md"), flags=re.MULTILINE)}
    raised = {(item.code, str(item.status)) for item in classes if item is not errors.SessionServerError}
    assert raised - {(HarnessError.code, "500")} == documented


def test_every_metric_is_documented() -> None:
    """docs/http-api.md names each metric of `/metrics`."""
    page = ServerMetrics().render().decode()
    served = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    documented = set(re.findall(r"`(harness_\w+)", _doc("http-api.md")))
    assert {name for name in served if not name.endswith("_created")} | {"harness_sessions_created_total"} == documented


def test_every_route_is_documented() -> None:
    """docs/http-api.md has each route of the server."""
    turns = turn_service(ScriptedEngine(toy_tokenizer()), toy_template(), MemoryStore())
    routes = {
        route.path.replace(":path}", "}").rstrip("/")
        for route in SessionServer(turns).app().routes
        if isinstance(route, Route)
    }
    text = _doc("http-api.md")
    assert {route for route in routes if route not in text and route != "/v1/models"} == set()


def test_the_table_of_routes_is_the_servers() -> None:
    """docs/http-api.md begins with each method of each path, and nothing else."""
    turns = turn_service(ScriptedEngine(toy_tokenizer()), toy_template(), MemoryStore())
    served = {
        (method, route.path.replace(":path}", "}"))
        for route in SessionServer(turns).app().routes
        if isinstance(route, Route) and route.methods
        for method in route.methods - {"HEAD"}
    }
    table = _doc("http-api.md").partition("## Routes")[2].partition("\n## ")[0]
    assert {*re.findall(r"`(GET|POST|PUT|DELETE) (\S+)`", table)} == served


def test_every_environment_variable_is_documented() -> None:
    """Each one that the code names, or of which it names the beginning: in docs/cli.md or CONTRIBUTING.md."""
    sources = [
        path
        for folder in ("harness", "server_patch", "agents", "tests", "soak", "bench")
        for path in (ROOT / folder).rglob("*.py")
    ]
    named = {
        name
        for path in sources
        for name in re.findall(r"[\"'`]\$?\{?(HARNESS_[A-Z_]+)", path.read_text(encoding="utf-8"))
    }
    pages = _doc("cli.md") + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    documented = {*re.findall(r"`(HARNESS_[A-Z_]+)`", pages)}
    assert [name for name in sorted(named) if not any(known.startswith(name) for known in documented)] == []
    assert documented - named == set()


def test_the_pages_made_from_the_code_are_current() -> None:
    """The fix is one command, `make reference`."""
    command = [sys.executable, "docs/site/written.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_error_class_is_in_the_tree() -> None:
    """The drawing at the top of errors.py has every class."""
    classes = {
        item.__name__ for item in vars(errors).values() if isinstance(item, type) and issubclass(item, HarnessError)
    }
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__ or "")) | {"HarnessError"}
    assert classes == drawn


def test_the_picture_of_rooms_is_the_layers_that_are_checked() -> None:
    """Floor by floor, from the top; a room that is missing in the picture, or stands on another floor, is named."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if "architecture.md" in contract["name"])
    floors = [[room.removeprefix("harness.") for room in re.split(r" [|:] ", layer)] for layer in layers]
    picture = _doc("architecture.md").partition("```text\nharness/\n")[2].partition("```")[0]
    drawn = [re.split(r" \| | {2}", line[2:].split("   ")[0]) for line in picture.splitlines() if line.startswith("  ")]
    assert drawn == floors
    rooms = {
        path.stem for path in (ROOT / "harness").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert rooms - {"__init__", "__main__"} == {room for floor in floors for room in floor}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """To a file that exists, and to a heading that it has."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not link.startswith(("http:", "https:")) and not (
            target.exists() and (not anchor or anchor in _anchors(target))
        ):
            broken.append(link)
    assert broken == []


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_the_docs_name_exist(page: Path) -> None:
    """A path in code style is one of the repository, of `harness/`, or has a placeholder in capitals."""
    named = set(re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|md|toml|jinja|txt))`", page.read_text(encoding="utf-8")))
    missing = {
        name
        for name in named
        if not re.search(r"NAME|<", name) and not any((folder / name).exists() for folder in (ROOT, ROOT / "harness"))
    }
    assert missing == set()


def test_every_public_name_is_in_the_reference() -> None:
    """docs/api.md names each once before a colon, and nothing else."""
    rows = re.findall(r"^- ((?:`\w+`[,:] ?)+)", _doc("api.md"), flags=re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(
        {*harness.__all__, *harness.training.__all__} - {"training"}
    )
