"""Writes the lists of docs/model-families.md from what the tests measure.

    python -m tests.conformance.families.page

Every line of a family is computed from that family alone, so a test can compare them one by one.
"""

import re
from collections.abc import Sequence
from functools import cache
from itertools import islice

from harness.tokens.conversations import exchanges
from harness.tokens.verify import FamilyUnderTest, Property, PropertyResult, exchanges_of_long_texts, verify
from tests.checkout import ROOT
from tests.conformance.families.family import NAMES, Family, load
from tests.conformance.families.retokenizing import KINDS, OUTPUTS, measure
from tests.conformance.families.serve_many import read_counts

PAGE = ROOT / "docs" / "model-families.md"
STRIDE = 10
"""The tests check every tenth of the generated conversations; `harness verify tokens` checks all."""

SERVED = [tally.conversations for tally in read_counts().values()]
COUNTS = (
    (r"\d+ conversations, \d+ per family", f"{sum(SERVED)} conversations, {min(SERVED)} per family"),
    (r"One in \d+ of the conversations", f"One in {STRIDE} of the conversations"),
    (r"\d+ outputs of each kind", f"{OUTPUTS} outputs of each kind"),
)
"""Counts in the page's sentences, as they are found and as they are."""


@cache
def verdicts_of(name: str) -> tuple[PropertyResult, ...]:
    """What the checks say of a family."""
    family = load(name)
    cases = [*islice(exchanges(), 0, None, STRIDE), *exchanges_of_long_texts()]
    return tuple(verify(FamilyUnderTest(family.chat, family.template), cases))


USUAL_WAYS = {"answer -> system user": "prefix", "answer -> developer user": "prefix"}
"""How the delimiter of these is found in most families; all others are `cached`."""
MOST_REFUSED = 10
"""Percent of conversations over which a template may raise; above that no property holds."""


def line_of(name: str) -> str:
    """Return the line of a family: how its turns are joined, what was served, which properties fail."""
    family = load(name)
    facts = [*_joined(family), *_served(name), *_failed(name), *_limits(family)]
    return f"- **{name}**: {'; '.join(facts)}."


def page() -> str:
    """Return the page with its lists, and its count of conversations, as they are measured."""
    shares = [measure(load(name)) for name in NAMES]
    ranges = [_range(kind, [each[kind] for each in shares if kind in each]) for kind in KINDS]
    joining, heading, text = PAGE.read_text(encoding="utf-8").partition("## Families")
    for pattern, counted in COUNTS:
        text = re.sub(pattern, counted, text)
    text = _with_list(text, r"- \*\*.+\.", [*map(line_of, NAMES)])
    return joining + heading + _with_list(text, r"- .+: \d+ to \d+", ranges)


def _with_list(text: str, line: str, lines: Sequence[str]) -> str:
    """`text` with `lines` in the place of its list of such lines."""
    return re.sub(rf"(?m)(^{line}\n)+", lambda _: "\n".join([*lines, ""]), text, count=1)


def _range(kind: str, found: Sequence[int]) -> str:
    return f"- {kind}: {min(found)} to {max(found)}"


def _joined(family: Family) -> list[str]:
    described = family.chat.describe()
    unusual: dict[str, list[str]] = {}
    for transition, delimiter in described.delimiters.items():
        way = str(delimiter).split()[0]
        if way != USUAL_WAYS.get(transition, "cached"):
            unusual.setdefault(way, []).append(transition)
    joined = [f"calls `{described.call_syntax}`"] if described.shows_calls else []
    if described.renderer:
        return [*joined, f"renderer `{described.renderer}` throughout"]
    late = [] if described.shows_late_system else ["folds late system messages"]
    return [
        *joined,
        *late,
        *(f"{way} at {', '.join(f'*{each}*' for each in each_at)}" for way, each_at in unusual.items()),
    ]


def _served(name: str) -> list[str]:
    tally = read_counts()[name]
    branched = f"{tally.branched} new branches ({100 * tally.branched / tally.continued:.0f}%)"
    return [f"{tally.refused} refused"] * bool(tally.refused) + [branched] * bool(tally.branched)


def _failed(name: str) -> list[str]:
    verdicts = verdicts_of(name)
    exact = next(verdict for verdict in verdicts if verdict.checked_property is Property.DELIMITER)
    refused, branched = (100 * count // exact.cases for count in (exact.refused, exact.branched))
    branches = [f"{branched}% of the checked ones branch"] * bool(branched)
    if refused > MOST_REFUSED:
        return [f"the template raises over {refused}% of the checked ones", *branches]
    failed = [f"*{verdict.checked_property.value}*" for verdict in verdicts if not verdict.holds]
    return [*branches, *([f"fails {', '.join(failed)}"] if failed else [])]


def _limits(family: Family) -> list[str]:
    described = family.chat.describe()
    limits = []
    if described.divergence is not None:
        seen = described.divergence
        limits.append(
            f"rewrites history (`{seen.conversation}`, token {seen.position}: `{seen.before}` becomes `{seen.after}`)"
        )
    if described.shows_calls and not described.reads_calls:
        limits.append("tool calls are not read as the template writes them")
    limits += ["does not show tools"] * (not described.shows_tools) + ["does not show calls"] * (
        not described.shows_calls
    )
    if not family.chat.tokenizer.markers:
        limits.append("no marker tokens: a message can imitate what separates messages")
    return limits


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
