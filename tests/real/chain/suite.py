"""A scenario on the whole chain of real engines: how one is played, and what holds of every one.

Agents are on the openai SDK; sessions come through a router of the run to one SGLang and one vLLM, whose words are
those of a script, so that tool loops are as long as a scenario wants them. Each scenario that is shipped for faults has
a play here that shows the same on these engines, with eight sessions and more of six turns and more (of the drains,
which come in second turns, the last two sessions have them):

    abort_end_of_rollout        test_abort_by_router.py     by a trainer; as a fault of a run in the next one
    abort_agent_ignores         test_aborts.py      test_agents_that_take_nothing_for_the_end
    abort_ten_drains            test_aborts.py      test_drains_in_a_row
    abort_weight_update_pause   test_updates.py     test_everything_stands_still_twice
    weight_updates              test_updates.py     test_weights_change_under_live_tool_loops
    abort_network               test_breaks.py      test_everything_between_agents_and_engines_breaks
    abort_engine_dies           test_breaks.py      the same, where the way to the engines dies and comes back, and
                                                    test_a_real_engine_dies, for good

A play decides nothing by a clock: whoever comes first to a moment triggers its fault, agents meet where all have to be
there, and steps that have to be met on the way are long.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.samples.codec import sample_from_json
from harness.suite.record.config import Overrides
from harness.suite.record.rollout_table import RolloutRecord, read_rollouts
from harness.suite.run.report import RunReport
from harness.types import Json
from tests.harness_command import write_scenario
from tests.played_suites import incomplete_inside, play
from tests.real.chain.tool_loop import AGENT, TOOL
from tests.session_servers.store_file import StoredSession, StoredTurn, ledger_of, read_file

TURNS = 6
"""Of a session, at least."""
SESSIONS = 8


@dataclass(frozen=True)
class Played:
    """A scenario that has been played: what the run says, and what an independent reader finds in its file."""

    report: RunReport
    rollouts: dict[int, RolloutRecord]
    sessions: dict[int, StoredSession]
    out: Path

    def answers(self, number: int) -> Any:
        """The result of an agent."""
        return self.rollouts[number].agent_result

    def ends(self, number: int) -> list[str]:
        """How the turns of a rollout ended."""
        return [turn.end for turn in self.sessions[number].turns.values()]

    @property
    def turns(self) -> list[StoredTurn]:
        """Those of all sessions."""
        return [turn for session in self.sessions.values() for turn in session.turns.values()]

    @property
    def firings(self) -> list[tuple[str, str]]:
        """Each time that a fault came: the action, and the problem that it had."""
        [scenario] = self.report.scenarios
        return [(firing.action, firing.problem) for fault in scenario.faults for firing in fault.firings]


def prompts(count: int = SESSIONS, /, **metadata: Any) -> list[Json]:
    """As many sessions, of agents with `metadata` (`tool_loop`)."""
    return [{"metadata": metadata}] * count


async def play_on_the_chain(
    directory: Path, model_dir: Path, workers: Mapping[str, str], *, script: list[Any], **keys: Any
) -> Played:
    """A scenario with `keys` on lanes of SGLang and vLLM, of which `workers` run already, and what holds of every one.

    Its checks hold, every fault came and did what it says, the ledger is what the file holds, the engines counted no
    other tokens, and no sample continues behind an incomplete turn.
    """
    out = directory / "run"
    scenario = write_scenario(
        directory / "scenario",
        check=None,
        program=AGENT,
        script={"steps": script},
        **{
            "services": {"lanes": [{"engine": "sglang"}, {"engine": "vllm"}], "router": True},
            "engine": {"model": str(model_dir), "script": "script.toml", "force_script": True},
            "samples_per_prompt": 1,
            "concurrency": SESSIONS,
            "agent": {
                "profile": "agent.py",
                "deadline_s": 900.0,
                "env": {"MEETINGS": str(directory / "meetings"), "WEIGHTS": str(out / "weights.json")},
                "request_kwargs": {"tools": [TOOL]},
            },
            **keys,
        },
    )
    report = await play(scenario, out, Overrides(workers=[f"{kind}={url}" for kind, url in workers.items()]))
    rollouts = read_rollouts(out / "run.db")
    file = read_file(out / "run.db")
    assert report.exit_code == 0, [verdict for each in report.scenarios for verdict in each.verdicts]
    assert report.ledger.difference == 0
    assert report.witness.agrees is not False, report.witness.words
    assert not any("does not say" in each.reason for each in report.witness.unwitnessed), report.witness.words
    sessions = {}
    for number, record in rollouts.items():
        assert record.session_id is not None, record
        sessions[number] = file[record.session_id]
        assert record.ledger.to_json() == ledger_of(sessions[number])
    samples = [sample_from_json(json.loads(line)) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert incomplete_inside(out / "run.db", samples) == []
    return Played(report, rollouts, sessions, out)
