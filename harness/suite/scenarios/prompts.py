"""Prompts of a scenario, in the order in which they run: filtered, shuffled, limited, repeated.

    rows that pass the filters, shuffled, the first of them: every epoch has exactly these
    epoch 0 in this order, every further one reshuffled

The order depends on the data and `[data]` alone (I10).
"""

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import ScenarioError
from harness.rollouts.seeds import derive_seed
from harness.suite.data.rows import DataSet, Filter, Rows
from harness.suite.exits import NothingSelected
from harness.suite.scenarios.scenario import Prompt, Scenario
from harness.suite.scenarios.validation import validate
from harness.suite.tasks.harbor_task import HarborTask, TaskRows
from harness.types import Json

_PROMPT_COLUMNS = ("prompt", "messages", "question")
"""Columns that hold the prompt where `data.prompt` names none."""

RowNumbers = npt.NDArray[np.int64]


class ScenarioPrompts:
    """Prompts by position. Reading waits for a disk; any thread may call."""

    def __init__(self, source: Path, scenario: Scenario, instruction: str) -> None:
        """Open nothing yet. `source` is the `scenario.toml`."""
        self._source, self._scenario, self._instruction = source, scenario, instruction
        self._spec, self._named = scenario.data, scenario.data.columns
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def __len__(self) -> int:
        return len(self._kept) * self._spec.epochs

    def check(self) -> None:
        """Read all rows once. Raises `ScenarioError`, or `NothingSelected` for none."""
        _ = self._kept

    def require_playable(self) -> None:
        """Raise `ScenarioError` if a Harbor task cannot be played by this agent in this sandbox."""
        if isinstance(self._rows, TaskRows):
            agent = self._scenario.agent
            for number in self._kept:
                self._rows.load(int(number)).require_playable(agent.name, agent.sandbox)

    def read(self, position: int) -> Prompt:
        """Return the prompt at `position`, which may be in a further epoch. Raises `ScenarioError`."""
        epoch, place = divmod(position, len(self._kept))
        number = int(self._order(epoch)[place])
        return self._prompt(number, self._rows.read(number))

    @property
    def files(self) -> Sequence[Path]:
        return self._rows.files if isinstance(self._rows, DataSet | TaskRows) else ()

    @cached_property
    def _rows(self) -> Rows:
        scenario = self._scenario
        name = scenario.prompts_file or scenario.harbor
        if name is None:
            return _InlineRows(self._source, scenario.prompts)
        if ".." in Path(name).parts:
            key = "prompts_file" if scenario.prompts_file else "harbor"
            raise ScenarioError(
                f"{self._source}: {key}: expected a path within the folder, or an absolute one, got {name!r}"
            )
        path = self._source.parent / name
        return TaskRows(path) if scenario.harbor else DataSet(path, self._spec.split)

    def task_of(self, prompt: Prompt) -> HarborTask | None:
        """Return the Harbor task of a prompt, if it is one."""
        return self._rows.find(prompt.metadata["task"]) if isinstance(self._rows, TaskRows) else None

    @cached_property
    def _prompt_column(self) -> str | None:
        usual = (name for name in _PROMPT_COLUMNS if name in self._rows.columns)
        return next(usual, None) if self._spec.prompt is None else self._spec.prompt

    @cached_property
    def _kept(self) -> RowNumbers:
        kept = np.fromiter(self._fitting(self._spec.limit if self._spec.shuffle is None else None), np.int64)
        if not kept.size:
            raise NothingSelected(f"{self._place}: expected a row that passes {self._spec.filter}, got none")
        return self._permute(kept, 0)[: self._spec.limit]

    def _fitting(self, most: int | None) -> Iterator[int]:
        filters = [Filter.parse(text) for text in self._spec.filter]
        unseen, named = filters, set(self._named)
        wanted = {name for each in filters for name in (each.column, each.top)}
        mapped = [*self._named, self._prompt_column or ""] if self._is_mapped else self._rows.columns
        for number, row in enumerate(self._rows.scan({*mapped, *wanted})):
            unseen = [each for each in unseen if row.keys().isdisjoint((each.column, each.top))]
            if most == 0:  # a column that no row has would pass as `null`, so only that is looked for
                if not unseen:
                    return
            elif all(each.fits(row) for each in filters):
                # Building each prompt would take a second for 100,000 rows.
                if not (self._is_mapped and row.keys() >= named and _is_said(row.get(self._prompt_column or ""))):
                    self._prompt(number, row)
                most = None if most is None else most - 1
                yield number
        if unseen:
            raise ScenarioError(f"{self._place}: filter: {_missing(unseen[0].top, self._rows.columns)}")

    def _shuffle(self, epoch: int) -> RowNumbers:
        return self._permute(self._kept, epoch) if epoch else self._kept

    def _permute(self, numbers: RowNumbers, epoch: int) -> RowNumbers:
        if self._spec.shuffle is None:
            return numbers
        # Its stream is frozen; numpy's generators may change theirs with a version.
        order = np.random.RandomState(derive_seed(self._spec.shuffle, epoch) % 2**32)
        return order.permutation(numbers)

    @property
    def _place(self) -> str:
        return f"{self._source}: {self._scenario.prompts_file or 'prompts'}"

    @cached_property
    def _is_mapped(self) -> bool:
        return bool(self._named) or self._prompt_column is not None

    def _prompt(self, number: int, row: Json) -> Prompt:
        where = self._rows.where(number)
        data = self._map_columns(where, row) if self._is_mapped else row
        prompt = validate(Prompt, data, source=where)
        if not _is_said(self._instruction if prompt.text is None else prompt.text):
            raise ScenarioError(f"{where}.text: expected a text, got nothing; give one or write instruction.md")
        return prompt

    def _map_columns(self, where: str, row: Json) -> Json:
        spec, prompt = self._spec, self._prompt_column
        for name in self._named:
            if name not in row:
                raise ScenarioError(f"{where}: {_missing(name, self._rows.columns)}")
        text = {} if prompt is None else {"text": _text_of(row.get(prompt))}
        return {
            **text,
            "metadata": {name: row[name] for name in spec.metadata},
            "check_metadata": {name: row[name] for name in spec.check_metadata},
        }


class _InlineRows:
    columns = tuple(Prompt.model_fields)

    def __init__(self, source: Path, prompts: Sequence[Prompt]) -> None:
        self._source, self._prompts = source, prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def scan(self, columns: Collection[str]) -> Iterator[Json]:
        return (prompt.model_dump() for prompt in self._prompts)

    def read(self, number: int) -> Json:
        return self._prompts[number].model_dump()

    def where(self, number: int) -> str:
        return f"{self._source}: prompts[{number}]"


def _is_said(text: Any) -> bool:
    return isinstance(text, str) and not text.isspace() and text != ""


def _missing(column: str, columns: Sequence[str]) -> str:
    return f"expected a column {column!r}, got {', '.join(columns)}"


def _text_of(value: Any) -> Any:
    """Join the messages of system and user before the first reply; other values stay."""
    if not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
        return value if value is not None else ""
    roles = [each.get("role") for each in value]
    asked = value[: roles.index("assistant")] if "assistant" in roles else value
    return "\n\n".join(str(each.get("content")) for each in asked)
