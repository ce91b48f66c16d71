"""`prompts_file` and `[data]`: rows of files of every kind as prompts, in an order that depends on nothing else."""

import asyncio
import datetime as dt
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import RunError, ScenarioError
from harness.suite.exits import NothingSelected
from harness.suite.record.config import Overrides, select
from harness.suite.record.rollout_table import read_rollouts
from harness.suite.run.interrupts import Interrupts
from harness.suite.run.open_run import OpenedRun, begin_run, resume_run
from harness.suite.run.runner import SuiteRun
from harness.suite.scenarios.prompts import ScenarioPrompts
from harness.suite.scenarios.scenario import Scenario
from harness.types import Json
from tests.harness_command import write_scenario
from tests.played_suites import Silence

LINES = '{"text": "one\\u2028two", "metadata": {"turns": 2}}\n{"check_metadata": {"answer": [1, 2.5, null]}}\n'
ROWS = [{"question": f"{n} + {n}?", "level": n % 3, "answer": str(2 * n)} for n in range(7)]
DATA = {"metadata": ["level"], "check_metadata": ["answer"]}


def _scenario(tmp_path: Path, name: str, data: Json | None = None, **others: Any) -> Path:
    directory = write_scenario(tmp_path / "s", **others)
    path = directory / "scenario.toml"
    keys = tomllib.loads(path.read_text())
    del keys["prompts"]
    path.write_text(tomli_w.dumps(keys | {"prompts_file": name, "data": data or {}}))
    return directory


def _prompts(directory: Path, **overrides: Any) -> ScenarioPrompts:
    return select(str(directory), Overrides(**overrides)).folders[0].prompts


def _texts(prompts: ScenarioPrompts) -> list[str | None]:
    return [prompts.read(position).text for position in range(len(prompts))]


def _write_jsonl(path: Path, rows: Sequence[Json]) -> None:
    import json

    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_csv(path: Path, rows: Sequence[Json]) -> None:
    import csv

    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _write_parquet(path: Path, rows: Sequence[Json]) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=2)


def _write_arrow(path: Path, rows: Sequence[Json], new: Callable[..., Any] = pa.ipc.new_file) -> None:
    table = pa.Table.from_pylist(list(rows))
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def _write_saved(path: Path, rows: Sequence[Json]) -> None:
    """As `Dataset.save_to_disk` does, in two shards whose names do not sort."""
    path.mkdir()
    _write_arrow(path / "b.arrow", rows[:3], pa.ipc.new_stream)
    _write_arrow(path / "a.arrow", rows[3:], pa.ipc.new_stream)
    (path / "state.json").write_text('{"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]}')
    (path / "dataset_info.json").write_text("{}")


def _write_hub(path: Path, rows: Sequence[Json]) -> None:
    (path / "data").mkdir(parents=True)
    (path / "README.md").write_text("# Data")
    _write_parquet(path / "data/train-00000-of-00002.parquet", rows[:3])
    _write_parquet(path / "data/train-00001-of-00002.parquet", rows[3:])
    _write_parquet(path / "data/test-00000-of-00001.parquet", rows[:1])


WRITERS: Mapping[str, Callable[[Path, Sequence[Json]], None]] = {
    "x.jsonl": _write_jsonl,
    "x.csv": _write_csv,
    "x.parquet": _write_parquet,
    "x.arrow": _write_arrow,
    "saved": _write_saved,
    "hub": _write_hub,
}


@pytest.mark.parametrize("name", WRITERS)
def test_rows_of_every_kind_of_file_become_the_same_prompts(tmp_path: Path, name: str):
    """Texts may span lines; CSV knows no numbers. Filters leave rows out."""
    rows = [*ROWS, {"question": 'over\n"two" lines, ü', "level": 1, "answer": "0"}]
    directory = _scenario(tmp_path, name, DATA | ({"split": "train"} if name == "hub" else {}))
    WRITERS[name](directory / name, rows)
    prompts = _prompts(directory)

    found = [prompts.read(position) for position in reversed(range(8))][::-1]
    assert [prompt.text for prompt in found] == [row["question"] for row in rows]
    assert [int(prompt.metadata["level"]) for prompt in found] == [row["level"] for row in rows]
    assert [prompt.check_metadata for prompt in found] == [{"answer": row["answer"]} for row in rows]
    assert _texts(_prompts(directory, filter=["level>=1", "question~^[0-9]"], limit=2)) == ["1 + 1?", "2 + 2?"]


def test_a_split_of_a_saved_dictionary_is_a_folder_of_it(tmp_path: Path):
    directory = _scenario(tmp_path, "saved", {"split": "test"})
    (directory / "saved").mkdir()
    for split, rows in (("train", ROWS[2:]), ("test", ROWS[:2] + ROWS[:2])):
        _write_saved(directory / "saved" / split, rows)
    (directory / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')

    assert len(_prompts(directory)) == 4


def test_messages_are_asked_up_to_the_first_reply(tmp_path: Path):
    """Dates are texts, since metadata is JSON."""
    roles = [("system", "Be short."), ("user", "Hi?"), ("assistant", "Hello."), ("user", "Bye?")]
    row = {"messages": [{"role": role, "content": text} for role, text in roles], "day": dt.date(2026, 1, 2)}
    directory = _scenario(tmp_path, "x.parquet", {"metadata": ["day"]})
    _write_parquet(directory / "x.parquet", [row])
    prompt = _prompts(directory).read(0)

    assert (prompt.text, prompt.metadata) == ("Be short.\n\nHi?", {"day": "2026-01-02"})


def test_each_line_is_a_prompt_and_what_changes_in_the_file_is_noticed(tmp_path: Path):
    """It is part of what a resume continues with; `--limit` takes the first ones."""
    directory = _scenario(tmp_path, "x.jsonl")
    (directory / "x.jsonl").write_text(LINES)
    prompts = _prompts(directory)
    read = [prompts.read(position) for position in range(2)]
    begin_run(str(directory), Overrides(limit=1), tmp_path / "run")
    taken_up = resume_run(str(directory), Overrides(), tmp_path / "run").selection.folders[0]
    (directory / "x.jsonl").write_text(LINES.replace("one", "two"))

    assert [prompt.text for prompt in read] == ["one\u2028two", None]
    assert read[0].metadata == {"turns": 2}
    assert read[1].check_metadata == {"answer": [1, 2.5, None]}
    assert taken_up.session_count == 2
    with pytest.raises(RunError, match=r"files\.x\.jsonl"):
        resume_run(str(directory), Overrides(), tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.jsonl", None, "x.jsonl: No such file or directory"),
        ("x.jsonl", b"", "x.jsonl: expected rows, got none"),
        ("x.jsonl", b'{"text": "a"}\n\n{"text": "b"}\n', "x.jsonl:2: expected a JSON object in UTF-8, got ''"),
        ("x.jsonl", b'{"text": 3}', "x.jsonl:1: text: expected a valid string, got 3"),
        ("x.jsonl", b'{"text": "a"}\n{"text": " "}', "x.jsonl:2.text: expected a text, got nothing"),
        ("x.jsonl", b'{"txt": "a"}', "x.jsonl:1: txt: expected a known key, got 'txt'; did you mean 'text'?"),
        ("x.jsonl", rb'{"text": "\ud800"}', "x.jsonl:1: "),
        ("x.jsonl", b"[" * 100_000, "x.jsonl:1: "),
        ("x.jsonl", b'["a"]', "x.jsonl:1: "),
        ("x.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "x.jsonl:2: expected a JSON object in UTF-8"),
        (
            "x.csv",
            b"question,answer\n\na,b\nc\n",
            "x.csv: expected a table with text in UTF-8: CSV parse error: Row #3: Expected 2 columns, got 1: c",
        ),
        ("x.csv", b"question\n", "x.csv: expected rows, got none"),
        ("x.csv", b"question\na\n\xff\n", "x.csv: expected a table with text in UTF-8: In CSV column #0: Row #3"),
        ("x.parquet", b"PAR1", "x.parquet: expected a table with text in UTF-8"),
        ("x.arrow", b"", "x.arrow: expected a table"),
        ("saved/state.json", b'{"_data_files": []}', "saved: expected rows, got none"),
        ("../x.jsonl", b"", "prompts_file: expected a path within the folder, or an absolute one, got '../x.jsonl'"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, name: str, content: bytes | None, said: str):
    """All are, before the first one runs."""
    directory = _scenario(tmp_path, name.removesuffix("/state.json"))
    if content is not None:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    with pytest.raises(ScenarioError) as refused:
        _prompts(directory)
    assert said in refused.value.message


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.parquet"])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"prompt": "Question"}, "expected a column 'Question', got question, level, answer"),
        ({"metadata": ["lvl"]}, "expected a column 'lvl', got question, level, answer"),
        ({"filter": ["lvl=3"]}, "filter: expected a column 'lvl', got question, level, answer"),
        ({"filter": ["lvl!=3"], "limit": 2}, "filter: expected a column 'lvl', got question, level, answer"),
        ({"filter": ["level"]}, "data.filter[0]: filter: expected COLUMN=VALUE"),
        ({"filter": ["level~["]}, "expected a regular expression behind ~, got '['"),
        ({"split": "train"}, "expected a folder with data.split = 'train'"),
        ({"metadata": ["level"], "check_metadata": ["level"]}, "expected metadata or check_metadata to have level"),
    ],
)
def test_a_wrong_column_or_filter_is_named(tmp_path: Path, name: str, data: Json, said: str):
    directory = _scenario(tmp_path, name, data)
    WRITERS[name](directory / name, ROWS)
    with pytest.raises(ScenarioError) as refused:
        _prompts(directory)
    assert said in refused.value.message


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_a_column_that_is_no_key_of_a_prompt_is_named_before_the_run(tmp_path: Path, name: str):
    directory = _scenario(tmp_path, name)
    WRITERS[name](directory / name, [{"text": "a", "level": 1}])
    with pytest.raises(ScenarioError, match="level: expected a known key"):
        _prompts(directory)


@pytest.mark.parametrize(
    ("condition", "fitting"),
    [
        ("id=9007199254740993", "b"),
        ("id>=9007199254740993", "b"),
        ("id=9007199254740992.0", "a"),
        ("lang=nan", "b"),
        ("lang!=nan", "a"),
        ("version=1.10", "b"),
        ("version>=1.2", ""),
        ("a.b=2", "b"),
        ("size<10", "a"),
    ],
)
@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_filters_compare_values_as_what_they_are(tmp_path: Path, name: str, condition: str, fitting: str):
    """Texts that name numbers are in the order of numbers."""
    directory = _scenario(tmp_path, name)
    rows = [
        {"question": "a", "id": 2**53, "lang": "de", "version": "1.1", "a.b": 1, "size": "9"},
        {"question": "b", "id": 2**53 + 1, "lang": "nan", "version": "1.10", "a.b": 2, "size": "10"},
    ]
    WRITERS[name](directory / name, rows)
    if fitting:
        assert _texts(_prompts(directory, filter=[condition])) == [fitting]
    else:
        with pytest.raises(NothingSelected):
            _prompts(directory, filter=[condition])


def test_a_column_of_later_lines_may_be_filtered_below_a_limit(tmp_path: Path):
    directory = _scenario(tmp_path, "x.jsonl")
    _write_jsonl(directory / "x.jsonl", [*ROWS, {"question": "last", "error": "late"}])
    assert _texts(_prompts(directory, filter=["error!=late"], limit=2)) == ["0 + 0?", "1 + 1?"]


def test_blank_lines_at_the_end_are_no_rows(tmp_path: Path):
    directory = _scenario(tmp_path, "x.jsonl")
    (directory / "x.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n\n  \n')
    assert _texts(_prompts(directory)) == ["a", "b"]


def test_shards_of_the_hub_may_have_digests(tmp_path: Path):
    directory = _scenario(tmp_path, "hub")
    (directory / "hub").mkdir()
    for shard in range(2):
        _write_parquet(directory / f"hub/train-0000{shard}-of-00002-a09b74b3ef9c3b56.parquet", ROWS)
    assert len(_prompts(directory)) == 14


def test_a_time_that_no_text_holds_is_named(tmp_path: Path):
    directory = _scenario(tmp_path, "x.parquet", {"metadata": ["at"]})
    times = pa.array([1_700_000_000_000_000_001], pa.timestamp("ns"))
    pq.write_table(pa.table({"question": ["a"], "at": times}), directory / "x.parquet")
    with pytest.raises(ScenarioError, match=r"x\.parquet: expected a table"):
        _prompts(directory)


def test_a_row_without_a_text_may_be_left_out(tmp_path: Path):
    """Nothing is left of another filter, which is no wrong file but nothing to run."""
    directory = _scenario(tmp_path, "x.parquet")
    _write_parquet(directory / "x.parquet", [*ROWS, {"question": None, "level": 9}])

    with pytest.raises(ScenarioError, match=r"x\.parquet: row 8\.text: expected a text, got nothing"):
        _prompts(directory)
    assert len(_prompts(directory, filter=["question!=null"])) == 7
    with pytest.raises(NothingSelected, match="expected a row that passes"):
        _prompts(directory, filter=["level>9"])


def test_a_folder_of_several_splits_wants_one_named(tmp_path: Path):
    directory = _scenario(tmp_path, "hub", {"split": "validation"})
    (directory / "hub").mkdir()
    with pytest.raises(ScenarioError, match=r"expected files of a data set \(\.parquet, "):
        _prompts(directory)
    _write_hub(directory / "hub", ROWS)
    with pytest.raises(ScenarioError, match=r"data\.split: expected one of data/test, data/train, got 'validation'"):
        _prompts(directory)


def test_a_saved_data_set_names_files_of_its_own_folder(tmp_path: Path):
    directory = _scenario(tmp_path, "saved")
    _write_saved(directory / "saved", ROWS)
    (directory / "saved/state.json").write_text('{"_data_files": [{"filename": "../../secret.arrow"}]}')
    with pytest.raises(ScenarioError, match=r"expected files of its folder, got '\.\./\.\./secret\.arrow'"):
        _prompts(directory)


def test_prompts_stand_in_one_place(tmp_path: Path):
    directory = write_scenario(tmp_path / "s")
    path = directory / "scenario.toml"
    path.write_text('prompts_file = "x.jsonl"\n' + path.read_text())
    with pytest.raises(ScenarioError, match="got both"):
        select(str(directory), Overrides())


def _inline(levels: Sequence[int], data: Json) -> ScenarioPrompts:
    prompts = [{"text": str(number), "metadata": {"level": level}} for number, level in enumerate(levels)]
    keys = {"schema_version": 1, "name": "s", "description": "", "agent": {"profile": "a"}}
    return ScenarioPrompts(
        Path("scenario.toml"), Scenario.model_validate(keys | {"prompts": prompts, "data": data}), ""
    )


@settings(deadline=None)
@given(
    levels=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    least=st.integers(0, 3),
    limit=st.none() | st.integers(1, 25),
    shuffle=st.none() | st.integers(0, 2**40),
    epochs=st.integers(1, 3),
)
def test_each_row_that_is_kept_runs_once_an_epoch(
    levels: list[int], least: int, limit: int | None, shuffle: int | None, epochs: int
):
    """In the same order whenever it is asked for, and from whatever position (I10)."""
    fitting = [str(number) for number, level in enumerate(levels) if level >= least]
    data = {"filter": [f"metadata.level>={least}"], "limit": limit, "shuffle": shuffle, "epochs": epochs}
    prompts, again = _inline(levels, data), _inline(levels, data)
    if not fitting:
        with pytest.raises(NothingSelected):
            prompts.check()
        return
    found = _texts(prompts)
    size = len(found) // epochs

    assert size == min(len(fitting), limit or len(fitting))
    assert set(Counter(found).values()) == {epochs}
    assert all(set(found[n * size : (n + 1) * size]) == set(found[:size]) for n in range(epochs))
    assert set(found) <= set(fitting)
    assert [again.read(position).text for position in reversed(range(len(found)))] == found[::-1]
    if shuffle is None:
        assert found == fitting[:size] * epochs


def test_epochs_have_orders_of_their_own(tmp_path: Path):
    """Training reads on behind the last epoch."""
    prompts = _inline([0] * 30, {"shuffle": 5})
    first, second = ([prompts.read(n).text for n in range(30 * epoch, 30 * epoch + 30)] for epoch in (0, 1))

    assert first != second
    assert sorted(first) == sorted(second) == sorted(map(str, range(30)))


class _StopAfter(Silence):
    def __init__(self, interrupts: Interrupts, count: int) -> None:
        self._interrupts, self._left = interrupts, count

    def end_rollout(self, record: Any) -> None:
        self._left -= 1
        if not self._left:
            self._interrupts.request()


async def test_a_run_that_is_taken_up_plays_each_row_once_an_epoch(tmp_path: Path):
    """A filtered, shuffled data set of two epochs, stopped in the middle."""
    check = "def score(transcript, result, metadata): return float(metadata['answer'])"
    data = DATA | {"filter": ["level<2"], "shuffle": 1, "epochs": 2}
    directory = _scenario(tmp_path, "x.parquet", data, samples_per_prompt=1, check=check, concurrency=2)
    _write_parquet(directory / "x.parquet", ROWS)

    def run(opened: OpenedRun, interrupts: Interrupts, progress: Silence) -> SuiteRun:
        return SuiteRun(opened.selection, opened.directory, progress, interrupts)

    interrupts = Interrupts()
    opened = begin_run(str(directory), Overrides(), tmp_path / "run")
    stopped = await run(opened, interrupts, _StopAfter(interrupts, 4)).execute()
    report = await run(resume_run(str(directory), Overrides(), tmp_path / "run"), Interrupts(), Silence()).execute()
    records = await asyncio.to_thread(read_rollouts, report.directory / "run.db")

    assert not stopped.is_complete
    assert report.is_complete
    assert Counter(record.reward for record in records.values()) == dict.fromkeys([0.0, 2.0, 6.0, 8.0, 12.0], 2)
