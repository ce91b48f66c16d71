"""`harness doctor`: checks this environment and machine, an engine server or an agent, and suggests fixes."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harness.cli import options, output
from harness.machine.findings import Finding, Level
from harness.server.telemetry.printable import printable
from harness.suite.exits import ExitCode

if TYPE_CHECKING:
    from harness.types import Json

_DEADLINE_S = 4.0
"""For all probes together."""

_Kind = Annotated[
    Literal["engine", "agent"] | None,
    typer.Argument(metavar="[KIND]", help="`engine` or `agent`.  [default: this installation]"),
]
_Name = Annotated[
    str | None, typer.Argument(metavar="[TARGET]", help="Address of the engine server, or name of the agent.")
]
EngineModel = Annotated[
    str | None, typer.Option(help="Weights or tokenizer that it should serve: name, folder or hub id.")
]


def doctor(kind: _Kind = None, name: _Name = None, *, model: EngineModel = None, as_json: options.Json = False) -> int:
    """Check this installation: packages, cache, loopback, installers, engines.

    `engine URL` does what `harness engine doctor URL` does, and `agent NAME` what `harness agent doctor NAME` does.

    Exit codes: 0 nothing fails (warnings are possible), 6 something fails.

    Examples: `harness doctor`, `harness doctor engine http://127.0.0.1:30000`, `harness doctor agent codex`
    """
    if kind is not None and name is None:
        raise typer.BadParameter(f"expected harness doctor {kind} {'URL' if kind == 'engine' else 'NAME'}")
    if model is not None and kind != "engine":
        raise typer.BadParameter("expected --model with an engine server: harness doctor engine URL --model NAME")
    if name is None:
        return _examine_installation(as_json=as_json)
    return examine_engine(name, model, as_json=as_json) if kind == "engine" else examine_agent(name, as_json=as_json)


def examine_engine(url: str, model: str | None, *, as_json: bool) -> int:
    import uvloop

    from harness.engines.examine.doctor import diagnose
    from harness.lab.models import resolve_model
    from harness.tokens.tokenizer import Tokenizer

    tokenizer = None if model is None else Tokenizer.load(resolve_model(model))
    found = uvloop.run(diagnose(url, tokenizer=tokenizer))
    use = "" if found.engine == found.protocol else f", use it as {found.protocol}={found.url}"
    title = f"{found.engine} {found.version} at {found.url}{use}"
    return _report(found.findings, found.to_json(), title, as_json=as_json)


def examine_agent(name: str, *, as_json: bool) -> int:
    from harness.rollouts.agents.doctor import examine_agent as examine
    from harness.rollouts.agents.programs import bundled_profile
    from harness.suite.run.interrupts import terminated_as_interrupted

    with terminated_as_interrupted():
        findings = asyncio.run(examine(bundled_profile(name)))
    return _report(findings, {"name": name, **_checks(findings)}, as_json=as_json)


def _examine_installation(*, as_json: bool) -> int:
    from harness.cli.installation.probes import PROBES, ask_all

    findings = ask_all(PROBES, _DEADLINE_S)
    return _report(findings, _checks(findings), as_json=as_json)


def _checks(findings: Sequence[Finding]) -> "Json":
    checks = [{**each._asdict(), "ok": each.level is not Level.FAIL} for each in findings]
    return {"ok": all(each["ok"] for each in checks), "checks": checks}


def _report(findings: Sequence[Finding], document: "Json", title: str = "", *, as_json: bool) -> int:
    counts = Counter(each.level for each in findings)
    if as_json:
        output.print_json(document)
    else:
        if title:
            output.print_text(printable(title))
        width = max(len(each.check) for each in findings)
        for each in findings:
            output.print_text(f"{each.level:7}  {each.check:{width}}  {printable(each.found)}")
            if each.next_step:
                output.print_text(f"{'':9}{'':{width}}  {printable(each.next_step)}")
        output.say(", ".join(f"{counts[level]} {level}" for level in Level))
    return ExitCode.INFRASTRUCTURE if counts[Level.FAIL] else ExitCode.PASSED
