"""`harness engine doctor URL`: what can this engine server do?"""

from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options, output

if TYPE_CHECKING:
    from harness.engines.examine.doctor import Diagnosis


def doctor(
    url: Annotated[str, typer.Argument(help="Address of a SGLang or vLLM server.", show_default=False)],
    *,
    model: Annotated[
        str | None,
        typer.Option(help="Weights or tokenizer that it should serve: name, folder or hub id.", show_default=False),
    ] = None,
    as_json: options.Json = False,
) -> int:
    """List what the engine server at URL can do, with the evidence for it; it goes on serving others meanwhile.

    Exit code 6 when it lacks something that sessions need. Example: `harness engine doctor http://127.0.0.1:30000`
    """
    import uvloop

    from harness.engines.examine.doctor import diagnose
    from harness.models import resolve_model
    from harness.suite.exits import ExitCode
    from harness.telemetry.logging import configure_logging
    from harness.tokens.tokenizer import Tokenizer

    configure_logging("error")
    tokenizer = None if model is None else Tokenizer.load(resolve_model(model))
    diagnosis = uvloop.run(diagnose(url, tokenizer=tokenizer))
    if as_json:
        output.print_json(diagnosis.to_json())
    else:
        _print(diagnosis)
    return ExitCode.PASSED if diagnosis.is_usable else ExitCode.INFRASTRUCTURE


def _print(diagnosis: "Diagnosis") -> None:
    spoken = "" if diagnosis.engine == diagnosis.protocol else f", use it as {diagnosis.protocol}={diagnosis.url}"
    output.print_text(f"{diagnosis.engine} {diagnosis.version} at {diagnosis.url}{spoken}")
    for finding in diagnosis.findings:
        output.print_text(f"{finding.answer:<8} {finding.capability:<16} {finding.evidence}")
    if not diagnosis.is_usable:
        output.say("harness: sessions cannot be served by this engine as it is")
