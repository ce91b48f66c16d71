"""`harness engine`, as a user types it."""

import json
from pathlib import Path

from tests.harness_command import harness
from tests.processes.family import is_running


def model_folder(tmp_path: Path) -> str:
    """What `--model` takes for a model; nothing reads its weights."""
    folder = tmp_path / "toy"
    folder.mkdir()
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    (folder / "config.json").write_text("{}")
    return str(folder)


def test_up_list_down(installed: Path, tmp_path: Path) -> None:
    """The address is the only thing on standard output; ending twice is no error."""
    up = harness(
        "engine", "up", "vllm", "--model", model_folder(tmp_path), "--env", "MARK=1", "--", "--handed", "through"
    )
    try:
        [listed] = json.loads(harness("engine", "list", "--json").stdout)
        assert (up.code, up.stdout.strip()) == (0, listed["url"])
        assert (listed["model"], listed["ready"], listed["holder"]) == ("toy", True, None)
        assert "'--handed', 'through'" in Path(listed["log"]).read_text()
        assert b"MARK=1" in Path(f"/proc/{listed['pid']}/environ").read_bytes().split(b"\0")
    finally:
        ended = harness("engine", "down")
    assert ended.stdout == f"ended {listed['name']}\n"
    assert [harness("engine", verb).stdout for verb in ("down", "list")] == ["nothing to end\n", "no lane is up\n"]
    assert not is_running(listed["pid"])


def test_down_needs_to_know_which(installed: Path, tmp_path: Path) -> None:
    """Several lanes are told apart by name, address or engine."""
    folder = model_folder(tmp_path)
    ups = [
        json.loads(harness("engine", "up", engine, "--model", folder, "--json").stdout)
        for engine in ("vllm", "vllm", "sglang")
    ]
    names = [up["name"] for up in ups]
    try:
        assert (harness("engine", "down").code, "several lanes are up" in harness("engine", "down").stderr) == (4, True)
        assert json.loads(harness("engine", "down", ups[0]["url"], "--json").stdout) == {"ended": [names[0]]}
        assert json.loads(harness("engine", "down", "vllm", "--json").stdout) == {"ended": [names[1]]}
    finally:
        ended = json.loads(harness("engine", "down", "--all", "--json").stdout)["ended"]
    assert ended == [names[2]]


def test_a_failed_start_is_no_bug_of_the_command(installed: Path, tmp_path: Path) -> None:
    """Its exit code says infrastructure, its message what the server said last."""
    failed = harness("engine", "up", "vllm", "--model", model_folder(tmp_path), "--env", "FAKE_ENGINE=die")

    assert (failed.code, "--no-such-flag" in failed.stderr, failed.stdout) == (6, True, "")
    assert list((installed / "engines" / "lanes").glob("*/server.log"))
