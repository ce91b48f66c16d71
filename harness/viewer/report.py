"""Figures of a run as tables, charts and test cases: the contents of `harness report` in any format.

The same run gives the same figures. Texts are as recorded; the writers of formats escape them. Missing or damaged parts
are sentences in `missing`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from shlex import join

import msgspec
import numpy as np

from harness.decoding import convert
from harness.samples.rollout import ENDED_WELL
from harness.sessions.ledger import Ledger, total
from harness.suite.judge.groups import CONFIDENCE, Rewarded, by_prompt, pass_at
from harness.suite.judge.verdicts import sessions_words
from harness.suite.record.rundir import RunDirectory
from harness.types import Json
from harness.viewer.look import look_at, look_into
from harness.viewer.problems import find_problems
from harness.viewer.run_view import RunView, SessionLine, say_missing
from harness.viewer.session_figures import SessionFigures, measure

_MOST_RESULT = 500  # characters
_QUANTILES = (0.0, 0.5, 0.95, 1.0)
_SPREAD = ("count", "mean", "least", "median", "95 %", "most")


@dataclass(frozen=True, slots=True)
class FigureTable:
    """Rows of texts. The first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Chart:
    """A histogram of `values`, or a bar chart."""

    title: str
    label: str
    """Axis label with the unit."""
    values: Sequence[float] = ()
    bars: Mapping[str, int] = field(default_factory=dict)


class CaseResult(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    """The agent, the model, a limit or a check caused it."""
    ERROR = "error"
    """The engine, harness or scenario caused it, or the result is missing."""
    UNKNOWN = "unknown"
    """Not recorded."""


@dataclass(frozen=True, slots=True)
class Case:
    """A session, check or run as a test case."""

    suite: str
    name: str
    result: CaseResult
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    source: str
    tables: Sequence[FigureTable]
    charts: Sequence[Chart]
    cases: Sequence[Case]
    missing: Sequence[str]


def make_report(path: Path) -> Report:
    """Report on a run or store. Raises as `look_at`."""
    view = look_at(path)
    missing = list(view.missing)
    told: Json = {}
    if view.status is not None:
        with say_missing("its report", missing):
            told = RunDirectory(path).read_result()
    figures: dict[int, SessionFigures] = {}
    for place, line in enumerate(view.sessions):
        if line.session_id is not None:
            with say_missing(f"session {line.session_id}", missing):
                figures[place] = measure(look_into(path, line.session_id))
    seen = list(figures.values())
    tables = [_run(view, missing), _outcomes(view), _rewards(view), _prompts(view), _problems(view)]
    tables += [_lengths(seen), _seconds(seen), _ends(seen), _tokens(view, seen, missing), _lags(seen), _gaps(view)]
    with say_missing("the telemetry of its report", missing):
        rows = [[str(key), _number(value)] for key, value in told.get("telemetry", {}).items()]
        tables.append(FigureTable("What a trainer logs of it", ("key", "value"), rows))
    tables.append(_sessions(view, figures))
    cases = [_case(line, figures.get(place)) for place, line in enumerate(view.sessions)]
    with say_missing("the checks of its report", missing):
        cases += list(_checks(told))
    if path.is_dir():
        cases.append(_run_case(view.status))
    return Report(view.source, [each for each in tables if each.rows], _charts(view, seen), cases, missing)


def _run(view: RunView, missing: list[str]) -> FigureTable:
    said = {"status": view.status, "suite": view.suite, "sessions": str(len(view.sessions))}
    with say_missing("when it was begun", missing):
        for start in view.starts:
            at = datetime.fromtimestamp(start["at"], UTC).isoformat(timespec="seconds")
            said[f"begun {at}"] = join(map(str, start["command"]))
    said |= {f"version of {name}": version for name, version in view.versions.items()}
    return FigureTable("Run", ("", ""), [[name, value] for name, value in said.items() if value is not None])


def _outcomes(view: RunView) -> FigureTable:
    counts = Counter(line.outcome or line.state or "no outcome" for line in view.sessions)
    rows = [[name, str(count), f"{count / len(view.sessions):.1%}"] for name, count in sorted(counts.items())]
    return FigureTable("Outcomes", ("outcome", "sessions", "share"), rows)


def _rewards(view: RunView) -> FigureTable:
    by_scenario: dict[str, list[float]] = {}
    for line in view.sessions:
        if line.reward is not None:
            by_scenario.setdefault(line.scenario or "", []).append(line.reward)
    return _spreads("Rewards", "scenario", by_scenario)


def _prompts(view: RunView) -> FigureTable:
    prompts = by_prompt(
        Rewarded(line.scenario or "", line.group or 0, line.number, line.reward)
        for line in view.sessions
        if line.number is not None and line.reward is not None
    )
    rows = []
    for each in prompts:
        interval = "-" if each.interval is None else " to ".join(map(_number, each.interval))
        ends = (f"{_number(each.rewards[number])}, session {number}" for number in (each.best, each.worst))
        rows.append([f"{each.group} of {each.scenario}", str(len(each.rewards)), _number(each.mean), interval, *ends])
    for scenario in dict.fromkeys(each.scenario for each in prompts):
        for k, share in pass_at([each for each in prompts if each.scenario == scenario]).items():
            rows.append([f"pass@{k} of {scenario}", "", _number(share), "", "", ""])
    columns = ("prompt", "samples", "mean reward", f"{CONFIDENCE:.0%} interval", "best", "worst")
    return FigureTable("Prompts", columns, rows)


def _problems(view: RunView) -> FigureTable:
    rows = [
        [each.cause, str(len(each.sessions)), sessions_words(each.sessions), _number(each.log)]
        for each in find_problems(view.sessions)
    ]
    return FigureTable("What went wrong", ("cause", "sessions", "which", "log of the first"), rows)


def _lengths(seen: Sequence[SessionFigures]) -> FigureTable:
    found: dict[str, Sequence[float]] = {
        "turns of a session": [len(each.seconds) for each in seen],
        "sampled tokens of a session": [sum(each.outputs) for each in seen],
        "sampled tokens of a turn": _all(each.outputs for each in seen),
        "prompt tokens of a turn": _all(each.prompts for each in seen),
    }
    return _spreads("Lengths", "", found)


def _seconds(seen: Sequence[SessionFigures]) -> FigureTable:
    parts = [parts for each in seen for parts in each.parts]
    rates = [
        tokens / seconds for each in seen for tokens, seconds in zip(each.outputs, each.seconds, strict=True) if seconds
    ]
    found: dict[str, Sequence[float]] = {
        "seconds of a turn": _all(each.seconds for each in seen),
        "seconds of a turn: held at the gate": [each.held for each in parts],
        "seconds of a turn: queued": [each.queued for each in parts],
        "seconds of a turn: engine": [each.engine for each in parts],
        "seconds of a turn: session server": [each.server for each in parts],
        "seconds between two turns: agent and tools": _all(each.between for each in seen),
        "sampled tokens a second of a turn": rates,
    }
    table = _spreads("Latency and throughput", "", found)
    timed = [each for each in seen if each.seconds]
    wall = max((each.ended_at for each in timed), default=0.0) - min((each.began_at for each in timed), default=0.0)
    if wall <= 0:
        return table
    rate = sum(sum(each.outputs) for each in timed) / wall
    row = ["sampled tokens a second of all sessions", "1", _number(rate), *[""] * 4]
    return replace(table, rows=[*table.rows, row])


def _ends(seen: Sequence[SessionFigures]) -> FigureTable:
    ends = sum((each.ends for each in seen), Counter[str]())
    rows = [[name, str(ends[name])] for name in sorted(ends)]
    return FigureTable("Ends of turns", ("end", "turns"), rows)


def _tokens(view: RunView, seen: Sequence[SessionFigures], missing: list[str]) -> FigureTable:
    rows: list[list[str]] = []
    with say_missing("its ledger", missing):
        ledger = total(each.ledger for each in seen) if view.ledger is None else convert(view.ledger, Ledger)
        counts = {"trained": ledger.trained, "masked": ledger.masked}
        counts |= {f"dropped: {reason}": count for reason, count in sorted(ledger.dropped.items())}
        counts |= {"possibly sampled, never received": ledger.unknown.tokens}
        rows = [[name, f"{count:,}"] for name, count in counts.items()] if ledger.generated else []
    return FigureTable("Tokens", ("fate", "tokens"), rows)


def _lags(seen: Sequence[SessionFigures]) -> FigureTable:
    lags = sum((each.lags for each in seen), Counter[int]())
    rows = [[str(lag), f"{lags[lag]:,}", f"{lags[lag] / lags.total():.1%}"] for lag in sorted(lags)]
    columns = ("versions behind the newest of its session", "tokens", "share")
    return FigureTable("Version lag", columns, rows)


def _gaps(view: RunView) -> FigureTable:
    shares = view.audit.get("shares", ())
    rows = [[each["cause"], *(_number(each[name]) for name in ("nats", "low", "high"))] for each in shares]
    columns = ("cause of the gap between engine and trainer", "nats", "95 % from", "to")
    return FigureTable("Audit", columns, rows)


def _sessions(view: RunView, figures: Mapping[int, SessionFigures]) -> FigureTable:
    facts_of = ("number", "session", "scenario", "outcome", "cause", "reward", "turns", "tokens", "seconds")
    rows = []
    for place, line in enumerate(view.sessions):
        facts = figures.get(place)
        turns, tokens = line.turns if facts is None else len(facts.seconds), line.sampled
        seconds = None if facts is None else sum(facts.seconds) + sum(facts.between)
        cells = [line.number, line.session_id, line.scenario, line.outcome, line.cause, line.reward, turns, tokens]
        rows.append([*map(_number, [*cells, seconds]), _why(line), _score(line), _result(line)])
    return FigureTable("Sessions", (*facts_of, "why", "score", "result"), rows)


def _charts(view: RunView, seen: Sequence[SessionFigures]) -> list[Chart]:
    ends = sum((each.ends for each in seen), Counter[str]())
    drops = sum((Counter(each.ledger.dropped) for each in seen), Counter[str]())
    lags = sum((each.lags for each in seen), Counter[int]())
    charts = [
        Chart("Rewards", "reward of a session", [line.reward for line in view.sessions if line.reward is not None]),
        Chart("Lengths", "sampled tokens of a session", [float(sum(each.outputs)) for each in seen]),
        Chart("Turns", "seconds of a turn", _all(each.seconds for each in seen)),
        Chart("Agent and tools", "seconds between two turns", _all(each.between for each in seen)),
        Chart("Ends of turns", "turns", bars=ends),
        Chart("Dropped tokens", "tokens", bars=drops),
        Chart("Version lag", "tokens", bars={f"{lag} behind": lags[lag] for lag in sorted(lags)}),
    ]
    return [each for each in charts if each.values or each.bars]


def _case(line: SessionLine, facts: SessionFigures | None) -> Case:
    name = f"session {line.session_id}" if line.number is None else f"rollout {line.number}"
    seconds = 0.0 if facts is None else sum(facts.seconds) + sum(facts.between)
    result, reason = CaseResult.PASSED, ""
    if line.outcome is None:
        result, reason = CaseResult.UNKNOWN, "it belongs to no rollout that has ended"
    elif line.outcome not in ENDED_WELL:
        result = CaseResult.ERROR if line.cause in ("engine", "harness", "scenario") else CaseResult.FAILED
        reason = f"{line.outcome}: {_why(line)}"
    elif line.score_error is not None:
        result, reason = CaseResult.FAILED, f"no score: {line.score_error}"
    return Case(line.scenario or "sessions", name, result, reason, seconds)


def _run_case(status: str | None) -> Case:
    if status == "passed":
        return Case("run", "status", CaseResult.PASSED)
    result = CaseResult.FAILED if status == "checks_failed" else CaseResult.ERROR
    return Case("run", "status", result, status or "the run is in progress, or was stopped")


def _checks(told: Json) -> Iterator[Case]:
    for scenario in told.get("scenarios", ()):
        for check in scenario.get("checks", ()):
            holds, said = check["holds"], f"expected {check['expected']}, got {check['seen']}"
            verdict = (CaseResult.PASSED, "") if holds else (CaseResult.FAILED, said)
            yield Case(str(scenario["name"]), f"check {check['check']}", *verdict)


def _score(line: SessionLine) -> str:
    figures = [f"{name} {_number(figure)}" for name, figure in line.score.get("figures", {}).items()]
    return "; ".join([*figures, *filter(None, [line.score.get("reason")])])


def _result(line: SessionLine) -> str:
    return "" if line.agent_result is None else msgspec.json.encode(line.agent_result).decode()[:_MOST_RESULT]


def _why(line: SessionLine) -> str:
    return "; ".join(each for each in (line.detail, line.last_words, line.score_error) if each)


def _all(parts: Iterable[Sequence[float]]) -> list[float]:
    return [value for part in parts for value in part]


def _spreads(title: str, first: str, found: Mapping[str, Sequence[float]]) -> FigureTable:
    rows: list[list[str]] = []
    for name, values in found.items():
        if values:
            numbers = np.asarray(values, float)
            spread = [float(numbers.mean()), *map(float, np.quantile(numbers, _QUANTILES))]
            rows.append([name, str(len(values)), *map(_number, spread)])
    return FigureTable(title, (first, *_SPREAD), rows)


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".") if math.isfinite(value) else "-"
    return "-" if value is None else str(value)
