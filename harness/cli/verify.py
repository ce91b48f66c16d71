"""`harness verify`: checks this project's guarantees on the user's model and engines."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli import options, output
from harness.suite.exits import ExitCode

if TYPE_CHECKING:
    from harness.engines.examine.comparison import Comparison
    from harness.tokens.chat_tokenizer import FamilyDescription
    from harness.tokens.verify import PropertyResult

app = typer.Typer(help="Check the harness's guarantees for a model.", no_args_is_help=True)

_Tokenizer = Annotated[
    Path, options.tokenizer_option("Tokenizer and chat template: a folder, or a model of the catalogue.")
]
_Engine = typer.Argument(help="`local`, `scripted`, `sglang=URL` or `vllm=URL`.")


@app.command("tokens")
def tokens(
    *,
    tokenizer: _Tokenizer,
    template: options.Template = None,
    renderer: options.Renderer = "auto",
    as_json: options.Json = False,
) -> int:
    """Check on generated conversations that prompts are exact, append-only and unforgeable, and that tool calls parse.

    Exit code 1 if a property fails, the template refuses more than a tenth of the conversations, or a fault is found.

    Example: `harness verify tokens --tokenizer ~/models/qwen3`
    """
    from harness.lab.models.tokenizer_files import find_template
    from harness.tokens.model_family import open_chat_tokenizer
    from harness.tokens.templates.chat_template import ChatTemplateTokenizer
    from harness.tokens.verify import FamilyUnderTest, verify

    template_file = None if template is None else find_template(template)
    chat = open_chat_tokenizer(tokenizer, template_file=template_file, renderer=renderer)
    plain = ChatTemplateTokenizer.load(tokenizer, template_file=template_file)
    family, results = chat.describe(), verify(FamilyUnderTest(chat, plain))
    passed = all(result.holds for result in results) and not family.faults
    if as_json:
        properties: list[dict[str, Any]] = [
            {**asdict(result), "name": result.checked_property.name.lower(), "holds": result.holds}
            for result in results
        ]
        output.print_json({"passed": passed, "family": asdict(family), "properties": properties})
    else:
        _print_tokens(family, results)
    return ExitCode.PASSED if passed else ExitCode.CHECKS_FAILED


@app.command("engine")
def engine(
    a: Annotated[str, _Engine],
    b: Annotated[str, _Engine],
    *,
    model: Annotated[
        str, options.option("HARNESS_MODEL", "Weights and tokenizer: catalogue name, folder or hub id.")
    ] = "smollm2-135m-instruct",
    tokens: Annotated[int, typer.Option(min=1, help="Length of each continuation.")] = 40,
    atol: Annotated[float, typer.Option(min=0, help="Largest difference of two logprobs, in nats.")] = 1e-3,
    top_k: Annotated[
        int, typer.Option(min=1, help="Worst rank that a differing token may have with the other engine.")
    ] = 5,
    as_json: options.Json = False,
) -> int:
    """Continue the same prompts greedily with both engines; exit code 1 if they are not close.

    Example: `harness verify engine local sglang=http://127.0.0.1:30000`
    """
    import uvloop

    from harness.engines.connect import open_engine
    from harness.engines.examine.comparison import compare_engines
    from harness.lab.models import resolve_model
    from harness.tokens.model_family import open_chat_tokenizer

    folder = resolve_model(model)
    chat = open_chat_tokenizer(folder)
    left, right = (open_engine(name, model_dir=folder, tokenizer=chat.tokenizer) for name in (a, b))

    async def compare() -> "Comparison":
        async with left, right:
            return await compare_engines(left, right, chat, tokens=tokens, atol=atol, top_k=top_k)

    comparison = uvloop.run(compare())
    lines = [
        f"{question}\n  " + report.render().replace("\n", "\n  ")
        for question, report in zip(comparison.questions, comparison.reports, strict=True)
    ]
    lines.append(
        f"{'close' if comparison.is_close else 'NOT close'}: {comparison.same_tokens} of {len(comparison.reports)}"
        f" continuations are equal, largest difference {comparison.largest:.5f} nats, mean {comparison.mean:.5f}"
    )
    output.print_result(comparison.to_json(), "\n".join(lines), as_json=as_json)
    return ExitCode.PASSED if comparison.is_close else ExitCode.CHECKS_FAILED


def _print_tokens(family: "FamilyDescription", results: "list[PropertyResult]") -> None:
    output.print_text(f"renderer     {family.renderer or 'none, the chat template'}")
    output.print_text(f"tool calls   {family.call_syntax}")
    for transition, source in family.delimiters.items():
        output.print_text(f"delimiter    {transition}: {source}")
    if family.divergence is not None:
        seen = family.divergence
        where = f"{seen.conversation}, token {seen.position}: {seen.before!r} became {seen.after!r}"
        output.print_text(f"template     rewrites history ({where})")
    for fault in family.faults:
        output.print_text(f"fault        {fault}")
    for note in family.notes:
        output.print_text(f"note         {note}")
    for result in results:
        counts = f"{result.cases} conversations, {result.refused} refused, {result.branched} branch"
        counts += "; too many refused to decide" * (result.mismatch is None and not result.holds)
        output.print_text(f"{'pass' if result.holds else 'FAIL'}  {result.checked_property:50}  {counts}")
        if result.mismatch is not None:
            output.print_text(f"      in       {result.mismatch.conversation}")
            output.print_text(f"      expected {result.mismatch.expected!r}")
            output.print_text(f"      got      {result.mismatch.seen!r}")
