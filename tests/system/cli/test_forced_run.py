"""`harness run` of a scenario that has its engine say known words."""

from pathlib import Path

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.engines.sglang_server import NativeServer, serve_in_process
from tests.builders import EOS, toy_tokenizer
from tests.harness_command import SCRIPT, write_scenario
from tests.played_suites import play
from tests.session_servers.store_file import read_file


async def test_a_suite_plays_its_script_on_an_engine_server(tmp_path: Path) -> None:
    """Every branch says the steps in their order; who asks for more is refused, and nothing is trained."""
    engine = ScriptedEngine(toy_tokenizer(), Script((ScriptStep(text="Its own words."),)))
    async with engine, serve_in_process(NativeServer(engine, toy_tokenizer(), Path("/weights")).app()) as url:
        toy = tmp_path / "toy"
        spec = {"name": f"sglang={url}", "model": str(toy), "script": "script.toml", "force_script": True}
        suite = write_scenario(tmp_path / "forced", engine=spec)
        for name in ("config.json", "model.safetensors"):  # of a model of which only the tokenizer is read here
            (toy / name).write_text("{}")
        report = await play(suite, tmp_path / "run")
    sessions = read_file(tmp_path / "run" / "run.db").values()

    said = [[*toy_tokenizer().encode(step["text"]), EOS] for step in SCRIPT["steps"]]
    assert [[turn.output for turn in session.turns.values()] for session in sessions] == [said] * 4
    ledger = report.ledger
    assert (ledger.trained, ledger.masked, ledger.dropped) == (0, 4 * sum(map(len, said)), {})
