"""Roles of the calls of a session, decided by one table from the record alone.

A *context* is a root and all turns that extend it: one system prompt and one set of tools. Contexts that share both
with the main one form the main line. The role of any other depends on when it ran and where its text is used. This
module knows no agents and does not decide what is trained: see `samples.delivery`.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from harness.types import Json, Message, Turn, TurnNotes

_WORDS = re.compile(r"[^\W\u2e80-\uffff]+|[\u2e80-\uffff]")  # a character in scripts without spaces
_WINDOW = 6  # words in a row that two texts do not share by chance
_LEAST_SHARE = 1 / 3  # of a summary: agents cut a preamble off, or edit a line


_Window = tuple[str, ...]


class Role(StrEnum):
    MAIN = "main"
    """Conversation that the rollout is about."""
    RESAMPLE = "resample"
    """Answer replaced by another one to the same prompt."""
    COMPACTION = "compaction"
    """Summary that a later context begins with."""
    REJECTED = "rejected"
    """Unused compaction."""
    SUBAGENT = "subagent"
    """Conversation with its own system prompt, while another call waits for its result."""
    SIDE = "side"
    """Title, topic or probe: text is used nowhere later."""
    STRAY = "stray"
    """Call of another program than the agent."""
    SUPERSEDED = "superseded"
    """Inherited turn that the restarted agent did not ask for again."""


class CallRole(NamedTuple):
    role: Role
    evidence: str


class _Caller(NamedTuple):
    dialect: str
    client: str


class _Signature(NamedTuple):
    system: tuple[str, ...]
    toolset: object


@dataclass(slots=True)
class _Context:
    root: Turn
    signature: _Signature
    caller: _Caller
    turns: list[Turn] = field(default_factory=list)
    held: set[int] = field(default_factory=set)  # turns of other contexts whose replies are in its history
    waits: set[int] = field(default_factory=set)
    """Turns of other contexts that waited for tool results when it began."""

    def is_alike(self, other: "_Context") -> bool:
        return (self.signature, self.caller) == (other.signature, other.caller)

    @property
    def has_tools(self) -> bool:
        return bool(self.root.notes.tools)

    @property
    def sampled(self) -> int:
        return sum(int(turn.output_ids.size) for turn in self.turns)


def find_roles(turns: Sequence[Turn]) -> dict[int, CallRole]:
    """Return roles by turn index; `turns` are in order of admission."""
    superseded = _find_superseded(turns)
    live = [turn for turn in turns if turn.is_usable and turn.output_ids.size and turn.index not in superseded]
    roles = superseded | _find_strays(live)
    contexts = _gather([turn for turn in live if turn.index not in roles])
    if contexts:
        main = _find_main(contexts)
        lines = _place_contexts(contexts, main)
        _place_calls(lines, main, roles)
    for turn in turns:
        if turn.index not in roles:
            before = None if turn.parent is None else roles.get(turn.parent)
            roles[turn.index] = CallRole(Role.MAIN if before is None else before.role, "no output")
    return {turn.index: roles[turn.index] for turn in turns}


def find_stray(turns: Sequence[Turn], notes: TurnNotes, messages: Sequence[Message]) -> str:
    """Return why an unsampled call is a stray, or "". `notes` and `messages` are those that its turn would have."""
    live = [turn for turn in turns if turn.is_usable and turn.output_ids.size]
    if not live:
        return ""
    if reason := _other_program(live, notes):
        return reason
    contexts = _gather([turn for turn in live if not _other_program(live, turn.notes)])
    if not contexts or not notes.toolset:
        return ""
    main = _find_main(contexts)
    waits = _open_waits(turn for context in contexts for turn in context.turns)
    return _other_client(main, _caller(notes), _Signature(_system(messages), notes.toolset), waits)


def _find_superseded(turns: Sequence[Turn]) -> dict[int, CallRole]:
    found: dict[int, CallRole] = {}
    continued: set[int | None] = set()
    for turn in reversed(turns):
        if turn.notes.inherited and not turn.notes.asked_again and turn.index not in continued:
            found[turn.index] = CallRole(Role.SUPERSEDED, "the restarted agent did not ask for it again")
        else:
            continued.add(turn.parent)
    return found


def _find_strays(live: Sequence[Turn]) -> dict[int, CallRole]:
    found = ((turn.index, _other_program(live, turn.notes)) for turn in live)
    return {index: CallRole(Role.STRAY, reason) for index, reason in found if reason}


def _other_program(live: Sequence[Turn], notes: TurnNotes) -> str:
    # A stray's process runs below the first caller's, with other code, and began later. A program that copies client,
    # system prompt and tools goes undetected if the server cannot inspect its process (docs/security.md).
    process = _process(notes)
    first = next((turn for turn in live if _process(turn.notes)), None)
    if first is None or not process:
        return ""
    agent = _process(first.notes)
    is_below = agent["id"] in process["ancestors"]
    if not is_below or process["program"] == agent["program"] or process["began_at"] < first.asked_at:
        return ""
    return f"the program {process['program']}, which began below {agent['program']} after turn {first.index}"


def _process(notes: TurnNotes) -> Json:
    return notes.client.get("process") or {}


def _gather(live: Sequence[Turn]) -> list[_Context]:
    by_root: dict[int, _Context] = {}
    root_of: dict[int, int] = {}
    replies: dict[object, int] = {}
    waits: set[int] = set()
    by_index = {turn.index: turn for turn in live}
    for turn in live:
        root = root_of[turn.index] = root_of.get(-1 if turn.parent is None else turn.parent, turn.index)
        if root == turn.index:
            context = by_root[root] = _Context(turn, _signature(turn), _caller(turn.notes))
            given = [key for message in turn.messages_delta for key in _reply_keys(message)]
            context.held = {replies[key] for key in given if key in replies}
            waits -= context.held
            context.waits = {index for index in waits if by_index[index].ended_at <= turn.asked_at}
            waits -= {index for index in waits if by_root[root_of[index]].is_alike(context)}
        by_root[root].turns.append(turn)
        if turn.parent in waits:
            taken = by_index[turn.parent]
            waits -= {index for index in waits if by_index[index].prompt_digest == taken.prompt_digest}
        if turn.reply.get("tool_calls"):
            waits.add(turn.index)
        replies.update((key, turn.index) for key in _reply_keys(turn.reply))
    return list(by_root.values())


def _open_waits(turns: Iterable[Turn]) -> set[int]:
    known = list(turns)
    extended = {turn.parent for turn in known}
    return {turn.index for turn in known if turn.reply.get("tool_calls") and turn.index not in extended}


def _reply_keys(message: Message) -> Iterator[object]:
    if message.get("role") == "assistant":
        calls = message.get("tool_calls") or ()
        yield from (call["id"] for call in calls if call.get("id"))
        if not calls and (content := str(message.get("content") or "").strip()):
            yield ("content", content)


def _signature(root: Turn) -> _Signature:
    return _Signature(_system(root.messages_delta), root.notes.toolset or root.notes.tools)


def _system(messages: Sequence[Message]) -> tuple[str, ...]:
    texts: list[str] = []
    for message in messages:
        if message["role"] not in ("system", "developer"):
            break
        texts.append(str(message.get("content") or ""))
    return tuple(texts)


def _caller(notes: TurnNotes) -> _Caller:
    return _Caller(notes.dialect, str(notes.client.get("user_agent", "")).lower().removeprefix("async"))


def _find_main(contexts: Sequence[_Context]) -> _Context:
    alike: defaultdict[_Signature, int] = defaultdict(int)
    for context in contexts:
        alike[context.signature] += 1
    first = [context for context in contexts if not context.waits]
    return max(
        first or contexts,
        key=lambda each: (len(each.turns), each.has_tools, alike[each.signature], each.sampled, -each.root.index),
    )


def _other_client(main: _Context, caller: _Caller, signature: _Signature, waits: Iterable[int]) -> str:
    """Return why a context belongs to another client, or ""."""
    if caller == main.caller:
        return ""
    is_other_in_all = signature.system != main.signature.system and signature.toolset != main.signature.toolset
    waiting = min(waits, default=None)
    if waiting is None and not is_other_in_all:
        return ""
    during = "" if waiting is None else f" while turn {waiting} waited for its results"
    return f"the client {caller.client or caller.dialect!r}{during}, the agent's is {main.caller.client!r}"


class _Candidate(NamedTuple):
    """Call whose text may be used later, with its signature if that must match."""

    turn: Turn
    signature: _Signature | None = None


class _PromptPlace(NamedTuple):
    number: int
    signature: _Signature
    text: str


def _find_uses(candidates: Sequence[_Candidate], places: Iterable[_PromptPlace]) -> dict[int, int]:
    """Map calls to the first later place that repeats their text."""
    by_window: defaultdict[_Window, list[int]] = defaultdict(list)
    sizes: list[int] = []
    for number, candidate in enumerate(candidates):
        # A summary that repeats its own request proves nothing.
        own = {each for message in candidate.turn.messages_delta for each in _windows(message.get("content"))}
        said = set(_windows(candidate.turn.reply.get("content"))) - own
        sizes.append(len(said))
        for window in said:
            by_window[window].append(number)
    found: dict[int, int] = {}
    for place in places if by_window else ():
        shared = Counter(number for window in set(_windows(place.text)) for number in by_window.get(window, ()))
        for number, count in shared.items():
            turn, signature = candidates[number]
            fits = place.number > turn.index and signature in (None, place.signature)
            if fits and count >= _LEAST_SHARE * sizes[number]:
                found[turn.index] = min(place.number, found.get(turn.index, place.number))
    return found


def _windows(text: object) -> Iterator[_Window]:
    words = _WORDS.findall(text) if isinstance(text, str) else ()
    return (tuple(words[i : i + _WINDOW]) for i in range(len(words) - _WINDOW + 1))


class _Line(NamedTuple):
    context: _Context
    placed: CallRole

    @property
    def is_line(self) -> bool:
        return self.placed.role in (Role.MAIN, Role.SUBAGENT)


@dataclass(frozen=True, slots=True)
class _Seen:
    held: set[int]  # turns whose replies are history in another context
    results: Mapping[int, int]  # calls whose text is a tool result, with the turn that reads it
    linked: set[int]  # roots whose prompts contain an earlier call's text
    extends: bool  # a main context has several turns
    subagents: set[_Signature] = field(default_factory=set)


def _place_contexts(contexts: Sequence[_Context], main: _Context) -> list[_Line]:
    results = (
        _PromptPlace(turn.index, context.signature, str(message.get("content") or ""))
        for context in contexts
        for turn in context.turns
        for message in turn.messages_delta
        if message["role"] == "tool"
    )
    alike = [context for context in contexts if context.signature == main.signature]
    extends = any(len(context.turns) > 1 for context in alike)
    lines = alike if extends else contexts
    anything = [_Candidate(turn) for context in contexts for turn in context.turns if len(lines) > 1]
    seen = _Seen(
        held={index for context in contexts for index in context.held},
        results=_find_uses([_Candidate(each.turns[-1]) for each in contexts if each.waits], results),
        linked=set(_find_uses(anything, _prompts(lines)).values()),
        extends=extends,
    )
    placed: list[_Line] = []
    for context in contexts:
        role = _place(context, main, seen)
        if role.role is Role.SUBAGENT:
            seen.subagents.add(context.signature)
        placed.append(_Line(context, role))
    return placed


def _place(context: _Context, main: _Context, seen: "_Seen") -> CallRole:
    waiting = min(context.waits, default=None)
    last = context.turns[-1].index
    has_several = len(context.turns) > 1
    is_alike = context.signature == main.signature
    has_own_system = context.signature.system != main.signature.system
    comes_back = any(turn.index in seen.held for turn in context.turns)
    is_linked = bool(context.held) or comes_back or has_several or context.root.index in seen.linked
    says_nothing = not context.signature.system and not context.has_tools
    is_beside = seen.extends and not is_linked and waiting is None and context is not main
    other_client = "" if comes_back else _other_client(main, context.caller, context.signature, context.waits)
    is_sub = waiting is not None and has_own_system
    rows: tuple[tuple[object, Role, str], ...] = (
        (says_nothing and is_beside, Role.SIDE, "nothing of the main line is in it, and its text is not used later"),
        (
            is_alike and not (other_client and waiting is not None),
            Role.MAIN,
            "system prompt and tools of the main line",
        ),
        (other_client, Role.STRAY, other_client),
        (context.signature in seen.subagents, Role.SUBAGENT, "system prompt and tools of a subagent"),
        (
            context.held and context.has_tools == main.has_tools and (comes_back or has_several or not seen.extends),
            Role.MAIN,
            f"continues turn {max(context.held, default=0)} with another system prompt or other tools",
        ),
        (is_sub and context.has_tools, Role.SUBAGENT, f"its own system prompt and tools, while turn {waiting} waited"),
        (is_sub and last in seen.results, Role.SUBAGENT, f"its text is a result that turn {waiting} waited for"),
        (has_several or (is_linked and not seen.extends), Role.MAIN, "another conversation of the agent's client"),
    )
    found = (CallRole(role, evidence) for holds, role, evidence in rows if holds)
    return next(found, CallRole(Role.SIDE, "its text is not used later"))


def _place_calls(lines: Sequence[_Line], main: _Context, roles: dict[int, CallRole]) -> None:
    """Write the role of every call, by its context, siblings and text."""
    calls = [(line, turn) for line in lines for turn in line.context.turns]
    extended = {turn.parent for _, turn in calls}
    leaves = [(line, turn) for line, turn in calls if turn.index not in extended]
    summaries = _find_summaries(leaves, [line.context for line in lines if line.is_line])
    kinds = {_kind(line, turn, main): turn.index for line, turn in leaves if turn.index in summaries}
    siblings: defaultdict[tuple[int | None, str], list[Turn]] = defaultdict(list)
    for _, turn in calls:
        siblings[turn.parent, turn.prompt_digest].append(turn)
    for line, turn in calls:
        role = line.placed
        if turn.index in summaries:
            role = CallRole(Role.COMPACTION, f"its text is in the prompt of turn {summaries[turn.index]}")
        elif role.role is not Role.STRAY and turn.index not in extended:
            accepted = kinds.get(_kind(line, turn, main))
            taken = max(
                siblings[turn.parent, turn.prompt_digest],
                key=lambda each: (each.index in extended, each.delivered, each.index),
            )
            if accepted is not None:
                role = CallRole(Role.REJECTED, f"asks what turn {accepted} was asked, and is not used")
            elif taken is not turn and role.role is not Role.SIDE:
                role = CallRole(Role.RESAMPLE, f"the agent took turn {taken.index}, an answer to the same prompt")
        roles[turn.index] = role


def _find_summaries(leaves: Sequence[tuple[_Line, Turn]], contexts: Sequence[_Context]) -> dict[int, int]:
    """Map calls to the first later prompt with their text."""
    last = max((context.root.index for context in contexts), default=-1)
    candidates = [
        # A call in a line counts only in a context of the same line.
        _Candidate(turn, line.context.signature if line.is_line else None)
        for line, turn in leaves
        if line.placed.role is not Role.STRAY and turn.index < last
    ]
    return _find_uses(candidates, _prompts(contexts))


def _prompts(contexts: Sequence[_Context]) -> Iterator[_PromptPlace]:
    seen: set[tuple[_Signature, str]] = set()
    for context in contexts:
        for message in context.root.messages_delta:
            text = str(message.get("content") or "")
            if message["role"] not in ("assistant", "tool") and (context.signature, text) not in seen:
                seen.add((context.signature, text))
                yield _PromptPlace(context.root.index, context.signature, text)


def _kind(line: _Line, turn: Turn, main: _Context) -> tuple[object, ...]:
    """Return a key shared by attempts at the same task."""
    has_own_system = line.context.signature.system not in ((), main.signature.system)
    last = turn.messages_delta[-1].get("content") if turn.messages_delta else None
    return line.context.signature, None if has_own_system and not line.is_line else last
