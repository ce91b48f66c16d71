"""Words on a terminal about a run: what `--dry-run` would run, and how a finished one ended."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from harness.cli import output
from harness.server.telemetry.printable import printable
from harness.suite.judge.groups import CONFIDENCE
from harness.suite.record.config import SuiteSelection
from harness.suite.run.report import RunReport, RunStatus, ScenarioReport
from harness.suite.scenarios.folder import ScenarioFolder
from harness.types import Json
from harness.viewer.look import look_at, look_into
from harness.viewer.problems import find_problems, next_command
from harness.viewer.terminal import empty_table, ledger_words, message_text, show

_MAX_LINE = 100
_MOST_REMARKS = 3  # of a scenario; `show` has each session's
_MOST_PROBLEMS = 5
_MOST_PROMPTS = 5
_MAX_TURNS = 4
_PLAIN_WIDTH = 100
_STATUS_WORDS = {
    RunStatus.PASSED: "[bold green]PASSED[/]",
    RunStatus.CHECKS_FAILED: "[bold red]CHECKS FAILED[/]",
    RunStatus.INTERRUPTED: "[bold yellow]INTERRUPTED[/]",
    RunStatus.INFRASTRUCTURE: "[bold red]INFRASTRUCTURE FAILED[/]",
}


def print_report(report: RunReport) -> None:
    show(*_sections(report), plain_width=_PLAIN_WIDTH)


def _sections(report: RunReport) -> Iterator[RenderableType]:
    yield from _dialogue(report.directory, report.scenarios[0])
    yield _table(report.scenarios)
    for scenario in report.scenarios:
        if scenario.faults:
            yield Padding(_faults(scenario), (1, 0, 0, 0))
    for scenario in report.scenarios:
        if any(len(each.rewards) > 1 for each in scenario.prompts):
            yield Padding(_prompts(scenario), (1, 0, 0, 0))
    for scenario in report.scenarios:
        for remark, count in scenario.remarks.most_common(_MOST_REMARKS):
            yield Text(f"{scenario.name}, {count} of {scenario.planned} sessions: {printable(remark)}", style="yellow")
    for verdict in (report.audit or {}).get("verdicts", ()):
        yield Text(printable(f"audit: {verdict}"), style="yellow")
    yield Padding(_facts(report), (1, 0))
    yield Text.from_markup(f"{_STATUS_WORDS[report.status]} in {report.seconds:.1f} s")
    yield from _end(report)


def report_json(report: RunReport) -> Json:
    """Return the form of `--json`: `result.json` with problems and the next command."""
    problems = find_problems(look_at(report.directory).sessions)
    command = next_command(report.directory, problems, is_complete=report.is_complete)
    return {**report.to_json(), "problems": [each.to_json() for each in problems], "next": command}


def _end(report: RunReport) -> Iterator[Text]:
    problems = find_problems(look_at(report.directory).sessions)
    for problem in problems[:_MOST_PROBLEMS]:
        yield Text(printable(problem.words), style="red")
    if len(problems) > _MOST_PROBLEMS:
        yield Text(f"and {len(problems) - _MOST_PROBLEMS} other causes", style="red")
    yield Text(f"next: {next_command(report.directory, problems, is_complete=report.is_complete)}", style="bold")


def _prompts(scenario: ScenarioReport) -> RenderableType:
    prompts = sorted(scenario.prompts, key=lambda each: each.mean)
    passed = ", ".join(f"pass@{k} {share:.3f}" for k, share in scenario.pass_at.items())
    columns = ("prompt", "samples", "mean", f"{CONFIDENCE:.0%} interval", "best session", "worst session")
    table = empty_table(numbers=columns, title=f"{scenario.name}: {passed}; its worst prompts:")
    for each in prompts[:_MOST_PROMPTS]:
        interval = "-" if each.interval is None else f"{each.interval.low:.3f} to {each.interval.high:.3f}"
        cells = (str(each.group), str(len(each.rewards)), f"{each.mean:.3f}", interval)
        table.add_row(*cells, *(f"{number}: {each.rewards[number]:.3f}" for number in (each.best, each.worst)))
    return table


def _dialogue(directory: Path, scenario: ScenarioReport) -> Iterator[RenderableType]:
    """Yield the beginning of the session with the best reward among those with several turns."""
    told = [record for record in scenario.records if record.is_final and record.session.turns > 1]
    if not told:
        return
    best = max(told, key=lambda record: record.reward or 0.0)
    turns = look_into(directory, str(best.session_id)).turns
    lines = Table.grid(padding=(0, 2))
    for turn in turns[:_MAX_TURNS]:
        # The last message to the model; examples and earlier messages are left out.
        for role, message in [*((str(each["role"]), each) for each in turn.messages[-1:]), ("assistant", turn.reply)]:
            text = printable(" ".join(message_text(message).split()))
            text = text if len(text) <= _MAX_LINE else f"{text[:_MAX_LINE]}..."
            lines.add_row(Text(role, style="dim"), Text(text, style="cyan" if role == "assistant" else ""))
    parts: list[RenderableType] = [lines]
    if len(turns) > _MAX_TURNS:
        parts.append(Text(f"... (turns left out: {len(turns) - _MAX_TURNS})", style="dim"))
    title = Text(f"{scenario.name}, session {best.number}:", style="bold")
    yield Padding(Group(title, *(Padding(part, (0, 0, 0, 2)) for part in parts)), (1, 0))


def _table(scenarios: Sequence[ScenarioReport]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("scenario", no_wrap=True)
    table.add_column("sessions")
    for name in ("turns", "tools", "cut", "tokens", "reward"):
        table.add_column(name, justify="right", no_wrap=True)
    for scenario in scenarios:
        outcomes = ", ".join(f"{count} {kind}" for kind, count in scenario.outcomes.most_common())
        table.add_row(
            escape(scenario.name),
            f"{outcomes or 'none'} of {scenario.planned}",
            *(f"{scenario.counts[name]:,}" for name in ("turns", "tool_calls", "truncated_turns")),
            f"{scenario.ledger.generated:,}",
            "-" if scenario.reward is None else f"{scenario.reward:.3f}",
        )
    return table


def _faults(scenario: ScenarioReport) -> RenderableType:
    """Describe every fault, each time it fired, and how the sessions present then ended."""
    lines: list[RenderableType] = [Text(f"{scenario.name}, faults:", style="bold")]
    for number, each in enumerate(scenario.faults):
        count = f"came {len(each.firings)} times" if len(each.firings) != 1 else "came once"
        lines.append(
            Text(f"  {number}. {each.fault.action} {each.fault.trigger}: {count if each.firings else 'never came'}")
        )
        for firing in each.firings:
            lines.append(Padding(Text(firing.words), (0, 0, 0, 5)))
            told = [*(bystander.words for bystander in firing.sessions), f"ledger: {ledger_words(firing.ledger)}"]
            lines += [Padding(Text(words, style="dim"), (0, 0, 0, 7)) for words in told]
    return Group(*lines)


def _facts(report: RunReport) -> Table:
    facts = Table.grid(padding=(0, 3))
    facts.add_row("ledger", ledger_words(report.ledger))
    heard = escape(report.witness.words)
    facts.add_row("witness", f"[red]{heard}[/]" if report.witness.agrees is False else heard)
    for scenario in report.scenarios:
        failed = [verdict for verdict in scenario.verdicts if not verdict.holds]
        held = len(scenario.verdicts) - len(failed)
        words = [f"{scenario.name}: {held} of {len(scenario.verdicts)} hold"]
        words += [f"[red]{v.check}: expected {escape(v.expected)}, got {escape(v.seen)}[/]" for v in failed]
        facts.add_row("checks", "\n".join(words))
    for scenario in report.scenarios:
        if dropped := scenario.dropped_trailing_turns:
            facts.add_row("merge", f"{scenario.name}: dropped_trailing_turns = {dropped}")
    if again := sum(scenario.replayed for scenario in report.scenarios):
        facts.add_row("replayed", f"failed rollouts that were rerun: {again}")
    ended = sum(scenario.counts["repeat_terminated_turns"] for scenario in report.scenarios)
    if report.is_guarded or ended:
        state = "active" if report.is_guarded else "not proven to be active"
        facts.add_row("guard", f"repeat guard {state}; it ended {ended} turns")
    formats = (
        "samples.jsonl, samples.parquet"
        if report.has_parquet
        else "samples.jsonl (Parquet: pip install 'session-harness[parquet]')"
    )
    facts.add_row("samples", f"{report.samples} in {formats}")
    facts.add_row("run", escape(str(report.directory)))
    return facts


def print_dry_run(
    selection: SuiteSelection, concurrency: int | None, *, as_json: bool, steps: int | None = None
) -> None:
    wanted = selection.config.overrides
    scenarios = [_plan(folder, concurrency, wanted.server, steps) for folder in selection.folders]
    plan: Json = {"suite": selection.config.suite, "steps": steps, "scenarios": scenarios}
    output.print_result({"dry_run": plan}, _text(plan), as_json=as_json)


def _plan(folder: ScenarioFolder, concurrency: int | None, server: str | None, steps: int | None) -> Json:
    scenario, prompts = folder.scenario, len(folder.prompts)
    sessions = folder.session_count
    if steps is not None and scenario.train is not None:
        sessions = steps * scenario.train.budget
    engine = {"server": server} if server else {"name": scenario.engine.name, "model": scenario.engine.model}
    services = scenario.services.model_dump(mode="json") if scenario.services is not None else {}
    return {
        "scenario": folder.name,
        "sessions": sessions,
        "prompts": prompts,
        "samples_per_prompt": scenario.samples_per_prompt,
        "concurrency": concurrency or scenario.concurrency,
        "engine": engine | {name: each for name, each in services.items() if each},
        "agent": scenario.agent.name,
        "deadline_s": scenario.agent.deadline_s,
        "limits": scenario.limits.model_dump(exclude_none=True),
        "is_scored": folder.check is not None or scenario.harbor is not None,
        "faults": len(scenario.faults),
    }


def _text(plan: Json) -> str:
    steps = "" if plan["steps"] is None else f", {plan['steps']} steps"
    lines = [f"would run {plan['suite']}{steps}; nothing was started"]
    for each in plan["scenarios"]:
        size = f"{each['sessions']} sessions, {each['prompts']} prompts x {each['samples_per_prompt']} samples"
        lines += [
            f"{each['scenario']}: {size}, {each['concurrency']} at a time",
            f"  engine  {_listed(each['engine'])}",
            f"  agent   {each['agent']}, {each['deadline_s']:g} s at most",
            f"  limits  {_listed(each['limits']) or 'none'}",
            f"  scored  {'yes' if each['is_scored'] else 'no'}",
        ]
        lines += [f"  faults  {each['faults']}"] if each["faults"] else []
    return "\n".join(lines)


def _listed(values: Json) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
