"""Serves conversations of every family until enough were not refused, and writes down what came of them.

    python -m tests.conformance.families.serve_many [--conversations N] [FAMILY ...]

Stops at the first conversation in which the engine's log is not what must hold (`served.judge`). The counts go into
`served.json`, from which `page` makes a table; those of families that are not named stay.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import monotonic

from hypothesis import HealthCheck, Phase, given, seed, settings

from harness.server.telemetry.logging import configure_logging
from tests.checkout import ROOT
from tests.conformance.families.family import NAMES, Family, load
from tests.conformance.families.sampling import Plan, plans
from tests.conformance.families.served import Conversation, judge, serve_conversation

COUNTS = ROOT / "tests" / "conformance" / "families" / "served.json"
ENOUGH = 850
"""Conversations of a family; more than ten thousand over all of them."""
_ROUND = 200
"""Plans that Hypothesis makes at once."""


@dataclass
class Tally:
    """What came of the conversations of a family."""

    template_digest: str
    """Of the chat template that they were served with."""
    conversations: int = 0
    """Served to their end, and judged."""
    refused: int = 0
    """Conversations in which the template refused some messages, which the client was told; they are not judged."""
    answers: int = 0
    with_calls: int = 0
    """Answers with tool calls."""
    continued: int = 0
    """Model calls that continued an answer."""
    branched: int = 0
    """Those of them that the server began a new branch for."""

    def take(self, made: Conversation) -> None:
        """Count a conversation, which holds what it must when it was served."""
        if made.refusal:
            self.refused += 1
            return
        self.conversations += 1
        self.answers += len(made.asked)
        self.with_calls += sum(bool(asked.reply.get("tool_calls")) for asked in made.asked)
        self.continued += made.continued
        self.branched += made.branches


def serve_many(family: Family, wanted: int) -> Tally:
    """Serve until `wanted` conversations were not refused. Raises `AssertionError` at the first that is wrong."""
    tally = Tally(family.template.template.digest)
    round_number = 0
    with asyncio.Runner() as runner:
        while tally.conversations < wanted:
            _serve_round(family, tally, wanted, round_number, runner)
            round_number += 1
    return tally


def _serve_round(family: Family, tally: Tally, wanted: int, round_number: int, runner: asyncio.Runner) -> None:
    @seed(round_number)
    @settings(
        max_examples=min(_ROUND, wanted - tally.conversations),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(plan=plans(family))
    def serve_one(plan: Plan) -> None:
        made = runner.run(serve_conversation(family, plan))
        if not made.refusal:
            judge(family, plan, made)
        tally.take(made)

    serve_one()


def read_counts() -> dict[str, Tally]:
    """The counts of the last run, by family."""
    return {name: Tally(**counts) for name, counts in json.loads(COUNTS.read_text(encoding="utf-8")).items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve, print and write down."""
    parser = argparse.ArgumentParser(description="Serve conversations of model families and judge the engine's log.")
    parser.add_argument("families", nargs="*", metavar="FAMILY", default=NAMES, help="all, when none is named")
    parser.add_argument("--conversations", type=int, default=ENOUGH, help="of each family, refused ones not counted")
    asked = parser.parse_args(arguments)
    configure_logging("error")
    for name in asked.families:
        began = monotonic()
        tally = serve_many(load(name), asked.conversations)
        load.cache_clear()
        counts = {known: asdict(old) for known, old in read_counts().items()} if COUNTS.exists() else {}
        counts[name] = asdict(tally)
        ordered = {known: counts[known] for known in NAMES if known in counts}
        COUNTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {tally}, {monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
