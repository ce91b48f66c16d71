"""`harness doctor`: checks this environment and machine, and suggests fixes."""

import typer

from harness.cli import options, output

_DEADLINE_S = 4.0
"""For all probes together; the command takes at most a second more."""


def doctor(*, as_json: options.Json = False) -> None:
    """Check this installation: packages, cache, disk, network, installers, engines. Leaves nothing behind.

    Exit codes: 0 nothing fails (warnings are possible), 6 something fails.

    Example: `harness doctor`
    """
    from collections import Counter

    from harness.cli.installation.findings import Level, ask_all
    from harness.cli.installation.probes import PROBES
    from harness.server.telemetry.printable import printable
    from harness.suite.exits import ExitCode
    from harness.suite.run.interrupts import terminated_as_interrupted

    with terminated_as_interrupted():
        findings = ask_all(PROBES, _DEADLINE_S)
    is_well = all(each.level is not Level.FAIL for each in findings)
    if as_json:
        output.print_json({"ok": is_well, "checks": [each._asdict() for each in findings]})
    else:
        width = max(len(each.check) for each in findings)
        for each in findings:
            output.print_text(f"{each.level:4}  {each.check:{width}}  {printable(each.found)}")
            if each.next_step:
                output.print_text(f"{'':6}{'':{width}}  {printable(each.next_step)}")
        counts = Counter(each.level for each in findings)
        output.say(", ".join(f"{counts[level]} {level}" for level in Level))
    if not is_well:
        raise typer.Exit(ExitCode.INFRASTRUCTURE)
