"""`harness verify`: whether what this project promises holds for the user's own model."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli import options, output, verify_engine

if TYPE_CHECKING:
    from harness.tokens.chat_tokenizer import FamilyDescription
    from harness.tokens.verify import Verdict

app = typer.Typer(help="Check that what is promised holds for a model.", no_args_is_help=True)

app.command("engine")(verify_engine.verify_engine)

_Tokenizer = Annotated[
    Path, typer.Option(envvar="HARNESS_TOKENIZER", help="Folder with tokenizer and chat template.", show_default=False)
]
_Template = Annotated[
    Path | None, typer.Option("--template", help="Chat template in place of the folder's.", show_default=False)
]


@app.command("tokens")
def tokens(
    *,
    tokenizer: _Tokenizer,
    template: _Template = None,
    renderer: options.Renderer = "auto",
    as_json: options.Json = False,
) -> int:
    """Check over generated conversations that prompts are exact, append-only and cannot be forged.

    Exit code 1 when a property does not hold. Example: `harness verify tokens --tokenizer ~/models/qwen3`
    """
    from harness.suite.exits import ExitCode
    from harness.tokens.chat_template import ChatTemplateTokenizer
    from harness.tokens.model_family import open_chat_tokenizer
    from harness.tokens.verify import Verified, verify

    chat = open_chat_tokenizer(tokenizer, template_file=template, renderer=renderer)
    plain = ChatTemplateTokenizer.load(tokenizer, template_file=template)
    family, verdicts = chat.describe(), verify(Verified(chat, plain))
    passed = all(verdict.holds for verdict in verdicts)
    if as_json:
        output.print_json({"passed": passed, "family": asdict(family), "properties": [_entry(v) for v in verdicts]})
    else:
        _print(family, verdicts)
    return ExitCode.PASSED if passed else ExitCode.CHECKS_FAILED


def _entry(verdict: "Verdict") -> dict[str, Any]:
    return {**asdict(verdict), "name": verdict.checked_property.name.lower(), "holds": verdict.holds}


def _print(family: "FamilyDescription", verdicts: "list[Verdict]") -> None:
    output.print_text(f"renderer     {family.renderer or 'none, the chat template'}")
    output.print_text(f"tool calls   {family.call_syntax}")
    for transition, source in family.delimiters.items():
        output.print_text(f"delimiter    {transition}: {source}")
    if family.divergence is not None:
        seen = family.divergence
        where = f"{seen.conversation}, token {seen.position}: {seen.before!r} became {seen.after!r}"
        output.print_text(f"template     rewrites history ({where})")
    for note in family.notes:
        output.print_text(f"note         {note}")
    for verdict in verdicts:
        _print_verdict(verdict)


def _print_verdict(verdict: "Verdict") -> None:
    counts = f"{verdict.cases} conversations, {verdict.refused} refused, {verdict.branched} branch"
    output.print_text(f"{'pass' if verdict.holds else 'FAIL'}  {verdict.checked_property:50}  {counts}")
    if verdict.mismatch is not None:
        output.print_text(f"      in       {verdict.mismatch.conversation}")
        output.print_text(f"      expected {verdict.mismatch.expected!r}")
        output.print_text(f"      got      {verdict.mismatch.seen!r}")
