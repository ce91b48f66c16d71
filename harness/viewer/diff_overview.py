"""The differences of two runs or sessions, for a terminal."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from harness.decoding import convert
from harness.server.telemetry.printable import printable
from harness.sessions.ledger import Ledger
from harness.suite.judge.groups import CONFIDENCE
from harness.viewer.diff import FirstDifference, Part, RunDiff, SessionPair
from harness.viewer.run_view import SHORT_ID, SessionLine
from harness.viewer.terminal import empty_table, ledger_words, missing_sentences

# Pairs shown; `--json` has all.
_SHOWN = 20


def run_diff_overview(diff: RunDiff) -> Iterator[RenderableType]:
    """Yield totals side by side, then the differing pairs."""
    table = empty_table(sentences=("",))
    for source in diff.sources:
        table.add_column(Text(printable(source)), overflow="fold")
    for outcome, counts in diff.outcomes.items():
        table.add_row(Text(printable(outcome)), *map(str, counts))
    if diff.rewards is not None:
        table.add_row("mean reward of pairs", *(f"{mean:.3f}" for mean in diff.rewards.means))
    table.add_row("tokens", *(f"{count:,}" for count in diff.tokens))
    if any(ledger is not None for ledger in diff.ledgers):
        sentences = ("-" if each is None else ledger_words(convert(each, Ledger)) for each in diff.ledgers)
        table.add_row("ledger", *map(Text, sentences))
    table.add_row("without a partner", *map(str, diff.alone))
    yield Padding(table, (0, 0, 1, 0))
    if diff.rewards is not None:
        found = diff.rewards
        interval = (
            f"{CONFIDENCE:.0%} interval {found.interval[0]:+.3f} to {found.interval[1]:+.3f}, over prompts"
            if found.interval is not None
            else "no interval, which takes five prompts"
        )
        yield Text(f"reward: {found.difference:+.3f} in {found.pairs} pairs of {found.prompts} prompts; {interval}")
    parted = [pair for pair in diff.pairs if pair.divergence is not None]
    same = sum(pair.compared for pair in diff.pairs) - len(parted)
    yield Text(
        f"pairs: {same} with the same tokens, {len(parted)} diverge, {len(diff.pairs) - same - len(parted)} unknown"
    )
    for pair in parted[:_SHOWN]:
        yield from _parting(pair)
    if len(parted) > _SHOWN:
        yield Text(f"and {len(parted) - _SHOWN} more: --json has all", style="dim")
    yield from missing_sentences(diff.missing)


def session_diff_overview(pair: SessionPair, missing: Sequence[str]) -> Iterator[RenderableType]:
    """Yield both ends and the first difference."""
    table = empty_table(sentences=("",))
    lines = pair.first, pair.second
    for line in lines:
        table.add_column(Text(printable((line.session_id or "none")[:SHORT_ID])))
    table.add_row("outcome", *(Text(printable(line.outcome or "-")) for line in lines))
    table.add_row("reward", *("-" if line.reward is None else f"{line.reward:.3f}" for line in lines))
    table.add_row("turns", *("-" if line.turns is None else str(line.turns) for line in lines))
    table.add_row("tokens", *("-" if line.sampled is None else f"{line.sampled:,}" for line in lines))
    if any(line.inherits for line in lines):
        table.add_row("inherits from", *(Text(printable((line.inherits or "-")[:SHORT_ID])) for line in lines))
        table.add_row("forked at turn", *("-" if line.forked_at is None else str(line.forked_at) for line in lines))
    yield Padding(table, (0, 0, 1, 0))
    if pair.divergence is not None:
        yield from _parting(pair)
    elif pair.compared:
        yield Text("the same tokens in the same turns")
    yield from missing_sentences(missing)


def _parting(pair: SessionPair) -> Iterator[RenderableType]:
    found = pair.divergence
    assert found is not None
    yield Text(printable(f"{_name(pair.first)} and {_name(pair.second)} part in {_where(found)}"), style="bold")
    for token_id, text in zip(found.token_ids, found.texts, strict=True):
        if found.position is not None:
            said = "ends there" if token_id is None else str(token_id)
            yield Text(f"  {said}: {printable(repr(text)) if text is not None else 'no text without a tokenizer'}")


def _name(line: SessionLine) -> str:
    known = (line.session_id or "none")[:SHORT_ID]
    return known if line.number is None else f"{line.number} ({known})"


def _where(found: FirstDifference) -> str:
    match found.part:
        case Part.TURNS:
            return f"turn {found.turn}, which one of them does not have"
        case Part.PARENT:
            return f"turn {found.turn}, which continue from different turns"
        case _:
            return f"turn {found.turn}, {found.part}, token {found.position}"
