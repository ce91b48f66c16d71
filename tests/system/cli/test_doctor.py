"""`harness doctor`: one's own installation."""

from pathlib import Path

from harness.cli.installation.probes import EXTRAS
from tests.harness_command import Ended, harness


def _examine(tmp_path: Path, **env: str) -> Ended:
    (tmp_path / "temporary").mkdir()
    return harness("doctor", "--json", env={"TMPDIR": str(tmp_path / "temporary"), **env})


def test_an_installation_that_works(tmp_path: Path):
    """Every thing is told of, and the cache, which is not there yet, is not made; nothing else is left either."""
    ended = _examine(tmp_path, HARNESS_CACHE=str(tmp_path / "new" / "cache"))

    checks = {each["check"]: each for each in ended.document["checks"]}
    expected = {"python", "platform", "packages", "cache", "loopback", "uv", "node"}
    assert expected | {f"extra {extra}" for extra in EXTRAS} <= checks.keys()
    assert {"uv", "node", "engine sglang", "engine vllm", "engine local"} <= checks.keys()
    assert (ended.code, ended.document["ok"]) == (0, True), ended.stdout
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*")] == [Path("temporary")]


def test_what_is_broken_is_told_with_the_way_out(tmp_path: Path):
    """A cache that is a file, and no npm, which is a warning."""
    (tmp_path / "file").touch()
    file = str(tmp_path / "file")
    ended = _examine(tmp_path, HARNESS_CACHE=file, PATH=str(tmp_path))

    checks = {each["check"]: each for each in ended.document["checks"]}
    assert (ended.code, ended.document["ok"]) == (6, False)
    assert [checks[name]["level"] for name in ("cache", "node")] == ["fail", "warn"]
    assert "HARNESS_CACHE" in checks["cache"]["next_step"]
    assert "codex" in checks["node"]["found"]


def test_lines_for_a_reader(tmp_path: Path):
    """Results on standard output, the sum beside it."""
    ended = harness("doctor", env={"HARNESS_CACHE": str(tmp_path)})

    assert {line[:7].strip() for line in ended.stdout.splitlines()} <= {"ok", "warn", ""}
    assert ended.stderr.endswith(" 0 fail\n")


def test_an_agent_by_either_command(tmp_path: Path):
    """The document is the same: an environment that is missing fails, with the command that makes it."""
    one, other = (
        harness(*words, "openai_agents", "--json", env={"HARNESS_CACHE": str(tmp_path)})
        for words in (("doctor", "agent"), ("agent", "doctor"))
    )

    assert (one.code, one.document) == (other.code, other.document)
    environment = one.document["checks"][-1]
    assert (one.code, environment["level"], environment["ok"]) == (6, "fail", False)
    assert environment["next_step"] == "harness agent install openai_agents"
