"""`harness verify engine A B`: do two engines that serve the same weights say the same?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options, output

if TYPE_CHECKING:
    from harness.engines.examine.comparison import Comparison

_Engine = typer.Argument(help="`local`, `scripted`, `sglang=URL` or `vllm=URL`.", show_default=False)


def verify_engine(
    a: Annotated[str, _Engine],
    b: Annotated[str, _Engine],
    *,
    model: Annotated[
        str, typer.Option(envvar="HARNESS_MODEL", help="Weights and tokenizer: catalogue name, folder or hub id.")
    ] = "smollm2-135m-instruct",
    tokens: Annotated[int, typer.Option(min=1, help="Length of each continuation.")] = 40,
    atol: Annotated[float, typer.Option(min=0, help="Largest difference of two logprobs, in nats.")] = 1e-3,
    top_k: Annotated[int, typer.Option(min=1, help="Where tokens differ, how good the other's must be.")] = 5,
    as_json: options.Json = False,
) -> int:
    """Continue the same prompts greedily with both engines; exit code 1 when they are not close.

    Example: `harness verify engine local sglang=http://127.0.0.1:30000`
    """
    import uvloop

    from harness.models import resolve_model
    from harness.suite.exits import ExitCode
    from harness.telemetry.logging import configure_logging

    configure_logging("error")
    folder = resolve_model(model)
    comparison = uvloop.run(_compare(a, b, folder, tokens=tokens, atol=atol, top_k=top_k))
    if as_json:
        output.print_json(comparison.to_json())
    else:
        _print(comparison)
    return ExitCode.PASSED if comparison.is_close else ExitCode.CHECKS_FAILED


async def _compare(a: str, b: str, folder: Path, *, tokens: int, atol: float, top_k: int) -> "Comparison":
    from harness.engines.connect import open_engine
    from harness.engines.examine.comparison import compare_engines
    from harness.tokens.model_family import open_chat_tokenizer

    chat = open_chat_tokenizer(folder)
    left, right = (open_engine(name, model_dir=folder, tokenizer=chat.tokenizer) for name in (a, b))
    async with left, right:
        return await compare_engines(left, right, chat, tokens=tokens, atol=atol, top_k=top_k)


def _print(comparison: "Comparison") -> None:
    for question, report in zip(comparison.questions, comparison.reports, strict=True):
        output.print_text(f"{question}\n  " + report.render().replace("\n", "\n  "))
    verdict = "close" if comparison.is_close else "NOT close"
    output.print_text(
        f"{verdict}: {comparison.same_tokens} of {len(comparison.reports)} continuations are equal,"
        f" largest difference {comparison.largest:.5f} nats, mean {comparison.mean:.5f}"
    )
