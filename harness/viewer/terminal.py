"""Rich renderables of the viewer's values, for a terminal or a pipe.

Every text of an agent, model or tool goes through `printable`, which writes out control characters, escape sequences
and bidirectional marks. Colors only repeat words, so a pipe loses nothing.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from shlex import join
from typing import ParamSpec

import msgspec
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from harness.decoding import convert
from harness.server.telemetry.printable import printable
from harness.sessions.ledger import Ledger
from harness.tokens.tokenizer import Tokenizer
from harness.turn_ends import TurnStatus
from harness.types import Json, Message
from harness.viewer.live.live_reading import LiveSessions
from harness.viewer.problems import find_problems
from harness.viewer.run_view import SHORT_ID, RunView, SessionLine, inheritance_facts, say_missing, walk_families
from harness.viewer.session_view import MASKED, TRAINED, SessionView, TokenView, TurnView

_P = ParamSpec("_P")

# Columns without a terminal.
_PLAIN_WIDTH = 160
_MOST_SHOWN = 500  # characters of a result; --json has all
_FATES = {TRAINED: "green", MASKED: "yellow"}
_DROPPED = "red"
_VERSIONS = ("cyan", "magenta", "blue", "bright_yellow")
_STATUSES = {"completed": "green", "truncated": "yellow", "aborted": "magenta", "failed": "red"}


def show(*parts: RenderableType, plain_width: int = _PLAIN_WIDTH) -> None:
    """Print `parts` as wide as the terminal, or in `plain_width` columns without one."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(Group(*parts))
        return
    console.width = plain_width
    with console.capture() as printed:
        console.print(Group(*parts))
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in printed.get().splitlines()))


def empty_table(
    *texts: str, numbers: Sequence[str] = (), sentences: Sequence[str] = (), title: str | None = None
) -> Table:
    """Return a table with these columns, from left to right; only sentences may break."""
    table = Table(title=title, title_justify="left", title_style="", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in texts:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for name in sentences:
        table.add_column(name)
    return table


def run_overview(view: RunView) -> Iterator[RenderableType]:
    """Yield the run's end, a line for each session, the ledger, and missing parts."""
    facts = Table.grid(padding=(0, 3))
    if view.suite is not None:
        facts.add_row("suite", Text(printable(view.suite)))
        facts.add_row("status", Text(printable(view.status or "not complete")))
    for start in view.starts:
        facts.add_row("started", Text(printable(f"{_moment(start['at'])}: {join(start['command'])}")))
    if view.versions:
        facts.add_row("with", Text(printable(", ".join(f"{k} {v}" for k, v in view.versions.items() if v))))
    yield facts
    if view.sessions:
        yield Padding(_sessions(view.sessions), (1, 0))
    if view.ledger is not None:
        yield Text(f"ledger: {ledger_words(convert(view.ledger, Ledger))}")
    yield from (Text(f"audit: {verdict}") for verdict in view.audit.get("verdicts", ()))
    yield from missing_sentences(view.missing)
    for problem in find_problems(view.sessions):
        yield Text(printable(problem.words), style="red")
    if family := [*walk_families([*view.sessions, *view.superseded])]:
        yield Padding(by_itself("lives and forks", _family, family), (1, 0, 0, 0))
    if view.superseded:
        ids = ", ".join(str(line.session_id)[:SHORT_ID] for line in view.superseded)
        yield Text(printable(f"superseded: {len(view.superseded)} sessions of attempts that were rerun: {ids}"))
    if view.sessions:
        first = view.sessions[0]
        name = str(first.number) if first.number is not None else str(first.session_id)[:SHORT_ID]
        yield Text(f"one session: {view.command} {name}", style="dim")


def session_overview(
    line: SessionLine,
    session: SessionView | None,
    turn: int | None,
    missing: Sequence[str],
    tokenizer: Tokenizer | None = None,
) -> Iterator[RenderableType]:
    """Yield a session's end, branches, tokens, and the dialogue of one turn or all."""
    facts = Table.grid(padding=(0, 3))
    facts.add_row("session", Text(printable(line.session_id or "none")))
    for name, value in _outcome(line):
        facts.add_row(name, Text(printable(value)))
    said = list(missing)
    if session is not None:
        with say_missing("its outcome", said):
            for row in _standing(session):
                facts.add_row(*row)
    yield facts
    yield from missing_sentences(said)
    if session is None:
        return
    yield Padding(by_itself("its turns", _branches, session), (1, 0))
    for each in session.turns:
        if turn is None or each.index == turn:
            yield by_itself(f"the words of turn {each.index}", _dialogue, each, tokenizer)


def _standing(session: SessionView) -> Iterator[tuple[str, Text]]:
    yield "phase", Text(printable(session.phase))
    if session.turns_in_flight:
        yield "in flight", Text(f"{session.turns_in_flight} turns without an outcome")
    if session.refusals:
        yield "refused", Text(printable(_counts(session.refusals)))
    for remark in session.remarks:
        yield "remark", Text(printable(remark), style="yellow")
    for name, words in inheritance_facts(session.inherits):
        yield name, Text(printable(words))
    if session.ledger:
        yield "ledger", Text(ledger_words(convert(session.ledger, Ledger)))


def by_itself(what: str, render: Callable[_P, RenderableType], *of: _P.args, **how: _P.kwargs) -> RenderableType:
    """Return the rendered part, or a sentence that it is damaged."""
    missing: list[str] = []
    part: RenderableType = ""
    with say_missing(what, missing):
        part = render(*of, **how)
    return Group(*missing_sentences(missing)) if missing else part


def token_table(turn: TurnView, tokenizer: Tokenizer | None) -> RenderableType:
    """Return a row for each sampled token of a turn: fate, weight version and logprob."""
    if turn.output_length and not turn.output_ids:
        return Text(f"turn {turn.index}: its {turn.output_length} tokens are not here, only their number", style="dim")
    table = Table(
        title=f"turn {turn.index}, tokens", title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False
    )
    for name in ("token", "id", "logprob", "version"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("goes to", "text"):
        table.add_column(name, no_wrap=True)
    seen: list[str] = []
    for token in turn.tokens(tokenizer):
        version = token.version or "-"
        if version not in seen:
            seen.append(version)
        table.add_row(
            str(token.position),
            str(token.token_id),
            "-" if token.logprob is None else f"{token.logprob:.4f}",
            Text(printable(version), style=_VERSIONS[seen.index(version) % len(_VERSIONS)]),
            Text(printable(token.fate), style=_FATES.get(token.fate, _DROPPED)),
            Text(_spell(token, tokenizer), style=_FATES.get(token.fate, _DROPPED)),
        )
    return Padding(table, (0, 0, 1, 0))


def _family(lines: Sequence[tuple[SessionLine, int]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for line, depth in lines:
        kin = "" if line.inherits is None else "continues" if line.forked_at is None else f"forks turn {line.forked_at}"
        reward = "" if line.reward is None else f"reward {line.reward:.3f}"
        name = f"{'  ' * (depth - 1)}+ " if depth else ""
        name += (line.session_id or "none")[:SHORT_ID]
        said = (name, kin, line.outcome or line.state or "no outcome", reward)
        table.add_row(*(Text(printable(each)) for each in said))
    return Group(Text("lives and forks:"), Padding(table, (0, 0, 0, 2)))


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"at {seconds}, which is no time"


def ledger_words(ledger: Ledger) -> str:
    dropped = sum(ledger.dropped.values())
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(ledger.dropped.items()))
    unknown = ledger.unknown
    unheard = f"; unknown: {unknown.requests:,} requests" if unknown.requests else ""
    # Otherwise it is an unset budget, which bounds nothing.
    if unknown.tokens <= ledger.generated:
        unheard = unheard and f"{unheard}, at most {unknown.tokens:,} tokens"
    return (
        f"{ledger.sources} = {ledger.trained:,} trained + {ledger.masked:,} masked + {dropped:,} dropped"
        f"{f' ({reasons})' if reasons else ''}; difference {ledger.difference}{unheard}"
    )


def message_text(message: Message) -> str:
    """Return the words of a message and its tool calls, not yet printable."""
    content = message.get("content") or ""
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    words = [
        content if isinstance(content, str) else msgspec.json.encode(content).decode(),
        *(f"{call.get('name')}({call.get('arguments')})" for call in calls),
    ]
    return " ".join(word.strip() for word in words if word)


def is_partial(turn: TurnView) -> bool:
    """Return whether the turn was cut, so that only its tokens may have its words."""
    return turn.status in (TurnStatus.ABORTED, TurnStatus.FAILED) and bool(turn.output_ids)


def reply_text(turn: TurnView, tokenizer: Tokenizer | None) -> str:
    """Return the words of the reply, decoding the tokens of a cut turn."""
    words = message_text(turn.reply)
    if words or turn.reply.get("reasoning_content") or tokenizer is None or not is_partial(turn):
        return words
    return "".join(token.text or "" for token in turn.tokens(tokenizer)) + " [cut]"


def _sessions(lines: Sequence[SessionLine]) -> Table:
    table = empty_table(
        *("", "session", "scenario", "outcome"), numbers=("turns", "tokens", "reward"), sentences=("why",)
    )
    for line in lines:
        table.add_row(
            "" if line.number is None else str(line.number),
            Text(printable((line.session_id or "none")[:SHORT_ID])),
            Text(printable(line.scenario or "")),
            Text(printable(line.outcome or line.state or "no outcome"), style="" if line.cause is None else "red"),
            "" if line.turns is None else str(line.turns),
            "" if line.sampled is None else f"{line.sampled:,}",
            "-" if line.reward is None else f"{line.reward:.3f}",
            Text(printable(line.last_words or line.detail)),
        )
    return table


def _outcome(line: SessionLine) -> Iterator[tuple[str, str]]:
    if line.scenario is not None:
        yield "rollout", f"{line.number} of {line.scenario}"
    if line.outcome or line.state:
        said = line.outcome or f"{line.state}"
        yield "outcome" if line.outcome else "state", said if line.cause is None else f"{said}, by the {line.cause}"
    if line.detail:
        yield "why", line.detail
    yield from _score(line)
    if line.agent_result is not None:
        yield "its result", _shortened(line.agent_result)
    if line.agent_log is not None:
        yield "its log", str(line.agent_log)
    if line.log_end:
        yield "it said last", "\n".join(line.log_end)


def _score(line: SessionLine) -> Iterator[tuple[str, str]]:
    if line.reward is not None:
        yield "reward", f"{line.reward:.3f}"
    if line.score_error is not None:
        yield "no score", line.score_error
    if reason := line.score.get("reason"):
        yield "reason", reason
    for name, figure in line.score.get("figures", {}).items():
        yield "score", f"{name} {figure:g}"
    for name, value in line.score.get("details", {}).items():
        yield "score", f"{name} {_shortened(value)}"


def _shortened(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _branches(session: SessionView) -> RenderableType:
    table = empty_table(
        *("turn", "status", "ended by", "weights"), numbers=("prompt", "sampled", "seconds"), sentences=("its tokens",)
    )
    # A turn stands below its parent, further right after a fork.
    for turn, depth in session.walk():
        mark = f"{'  ' * (depth - 1)}+ " if depth else ""
        unknown = f", at most {turn.unknown:,} unknown" if turn.unknown else ""
        table.add_row(
            f"{mark}{turn.index}",
            Text(printable(turn.status), style=_STATUSES.get(turn.status, "")),
            Text(printable(turn.end)),
            Text(printable(", ".join(dict.fromkeys(str(span["version"]) for span in turn.versions)))),
            f"{turn.prompt_length:,}",
            f"{turn.output_length:,}",
            f"{turn.seconds:.2f}",
            Text(printable(_counts(turn.fates) + unknown + "".join(f"; {each}" for each in _remarks(turn)))),
        )
    return table


def _remarks(turn: TurnView) -> Iterator[str]:
    if turn.inherited:
        yield "inherited" if turn.asked_again else "inherited, not asked again"
    if turn.role != "main":
        yield turn.evidence


def _dialogue(turn: TurnView, tokenizer: Tokenizer | None) -> RenderableType:
    lines = Table.grid(padding=(0, 2))
    for message in turn.messages:
        lines.add_row(Text(printable(str(message.get("role"))), style="dim"), Text(printable(message_text(message))))
    style = _STATUSES.get(turn.status, "")
    reasoning = turn.reply.get("reasoning_content")
    if reasoning:
        lines.add_row(Text("reasoning", style="dim"), Text(printable(str(reasoning)), style="dim"))
    lines.add_row(Text("assistant", style="dim"), Text(printable(reply_text(turn, tokenizer)), style=style))
    if turn.error is not None:
        said: Json = turn.error
        lines.add_row(Text("error", style="dim"), Text(printable(f"{said.get('code')}: {said.get('message')}"), "red"))
    title = f"turn {turn.index}: {turn.status} by {turn.end}"
    title += f", in {turn.attempts} attempts" if turn.attempts > 1 else ""
    title += "" if turn.delivered else ", not delivered"
    return Group(Text(printable(title), style="bold"), Padding(lines, (0, 0, 1, 2)))


def _spell(token: TokenView, tokenizer: Tokenizer | None) -> str:
    if token.text is None:
        return "" if tokenizer is None else f"id {token.token_id} is not in this tokenizer"
    return '"' + printable(token.text).replace("\n", "\\n").replace("\t", "\\t") + '"'


def missing_sentences(sentences: Sequence[str]) -> Iterator[RenderableType]:
    for sentence in sentences:
        yield Text(f"missing: {printable(sentence)}", style="yellow")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


_COLORS = {"engine": "green", "held": "yellow", "queued": "yellow", "tool": "cyan"}


def live_table(live: LiveSessions, *, most: int | None = None, name_width: int | None = None) -> Table:
    """Render a row for each of the first `most` sessions, with the server's words made printable."""
    rows = empty_table("session", "state", numbers=("turns", "in flight", "tokens", "tokens/s"))
    # A terminal is drawn by another thread than the one that looks.
    for name, each in islice(live.sessions.items(), most):
        rate = live.rates.get(name)
        state = Text(printable(each.state), style=_COLORS.get(each.state, ""))
        numbers = (f"{each.turns:,}", f"{each.turns_in_flight}", f"{each.tokens:,}")
        rows.add_row(Text(printable(name)[:name_width]), state, *numbers, "-" if rate is None else f"{rate:.0f}")
    return rows
