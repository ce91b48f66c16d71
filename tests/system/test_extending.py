"""The steps of `docs/extending.md`, taken in a copy of the house, with no change beyond the files that it names."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.checkout import ROOT

Edits = Mapping[str, Mapping[str, str]]
"""Text to insert, by file and by the text that it goes before."""


class HowTo(NamedTuple):
    """A section of the page, as a developer follows it."""

    title: str
    most_files: int
    inserted: Edits
    script: str
    """A program that uses what was added."""
    added: Mapping[str, str] = {}
    """New files, with the toys of other tests that they are."""


DIALECT: Edits = {
    "harness/dialects/dialect.py": {
        "DIALECTS: tuple": "from harness.dialects.toy import ToyDialect\n\n",
        "Gemini())": "ToyDialect(), ",
    }
}
ENGINE: Edits = {
    "harness/engines/kinds.py": {
        '        EngineKind(\n            "vllm",': """\
        EngineKind(
            "toy",
            server=ServerKind(
                title="Toy",
                open=_import_on_call("harness.engines.remote.toy", "ToyProvider"),
                abort_all=ControlVerb("/quiet", {}),
                resume=ControlVerb("/go_on", {}),
                paused=PauseQuestion("/asleep", lambda status, _: True if status == 200 else None),
            ),
        ),
"""
    }
}
VERB: Edits = {
    "harness/sessions/gate.py": {
        "class HoldReport": """\
class ShortenRequest(RenewRequest, frozen=True, forbid_unknown_fields=True):
    pass


""",
        "    def release(": """\
    def shorten(self, holder: str, until: float) -> Hold:
        mine = self._require(holder)
        hold = replace(mine, until=min(until, mine.until))
        self._change({**self._holds, holder: hold})
        return hold

""",
    },
    "harness/server/gatekeeper.py": {
        "    async def keep(": """\
    async def shorten(self, wanted: RenewRequest) -> None:
        hold = self.gate.shorten(wanted.holder, self.lease_clock() + wanted.lasts_s)
        self.look_again()
        await self.keep(hold)

"""
    },
    "harness/server/routes.py": {
        "\nlog = get_logger": "from harness.sessions.gate import ShortenRequest\n",
        '                Route("/sessions/gate"': """\
                Route("/sessions/shorten", admin(self._shorten), methods=["POST"]),
""",
        "    async def _resume(": """\
    async def _shorten(self, request: Request) -> Response:
        await self.gatekeeper.shorten(await read_fields(request, self.settings.limits, ShortenRequest))
        return json_response(await self._report_gate())

""",
    },
    "harness/rollouts/client/gate.py": {
        "    async def resume(": """\
    async def shorten(self, ttl_s: float, *, deadline_s: float) -> GateReport:
        return await self._ask("POST", "shorten", deadline_s, self._holder | {"ttl_s": ttl_s})

"""
    },
}
COLUMN: Edits = {
    "harness/types.py": {"    repeat_terminated: int = 0\n": "    places: npt.NDArray[np.int32]\n"},
    "harness/samples/merge.py": {
        "    end = 0\n": "    places = np.full(size, -1, dtype=np.int32)\n",
        "        logprobs[own] = ": "        places[own] = np.arange(end - begin)\n",
        '        "loss_mask": ': '        "places": as_ids(places[start:]),\n',
    },
    "harness/samples/columns.py": {
        '    SampleColumn("returns"': '    SampleColumn("places", "<i4", -1, "places_in_turn"),\n'
    },
}
TRY_DIALECT = """
import asyncio

from tests.session_servers.served import says, serving


async def main():
    async with serving(*says("four")) as client:
        session = await client.create()
        answer = await client.http.post(f"{session.base_url}/toy/questions", json={"ask": "2+2?"})
        [turn] = (await client.record(session))["turns"]
    assert answer.json() == {"said": "four", "turn": 0}, answer.text
    assert turn["notes"]["dialect"] == "toy", turn


asyncio.run(main())
"""
TRY_ENGINE = """
import asyncio

from harness.engines.connect import open_engine
from tests.builders import EOS, toy_tokenizer, user
from tests.session_servers.served import serving_with
from tests.unit.engines.toy_server import toy_server


async def main():
    async with toy_server([*toy_tokenizer().encode_plain("four"), EOS]) as (url, had):
        async with serving_with(open_engine(f"toy={url}", tokenizer=toy_tokenizer())) as client:
            session = await client.create()
            assert (await client.say(session, [user("2+2?")]))["content"] == "four"
            [sample] = await client.samples(session)
    assert had == ["POST /say"]
    assert sum(sample["loss_mask"]) == len(toy_tokenizer().encode_plain("four")) + 1


asyncio.run(main())
"""
TRY_VERB = """
import asyncio

from harness.rollouts.client.session_server import SessionServerClient
from tests.session_servers.served import says, serving


async def main():
    async with serving(*says("four")) as server, SessionServerClient(server.url) as owner:
        mine, other = owner.gate("mine", 600.0), owner.gate("other", 600.0)
        await mine.pause(deadline_s=9.0)
        await other.pause(deadline_s=9.0)
        for _ in range(2):
            report = await mine.shorten(200.0, deadline_s=9.0)
        ends = [round(hold.ends_in_s, -2) for hold in report.holds]
        assert (report.state, ends) == ("paused", [200.0, 600.0]), report
        await mine.shorten(0.05, deadline_s=9.0)
        while len((await owner.gate().report(deadline_s=9.0)).holds) > 1:
            await asyncio.sleep(0.05)


asyncio.run(main())
"""
TRY_COLUMN = """
import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
from harness.errors import RunError
from harness.samples.codec import sample_from_binary, sample_from_json, sample_to_binary, sample_to_json, write_parquet
from harness.samples.columns import cut_columns, trainer_columns
from tests.builders import assistant, new_session, take_turn, user

session = new_session()
first = take_turn(session, [user("a")], "four")
second = take_turn(session, [user("a"), assistant("four"), user("b")], "six")
[sample] = session.samples()
places = sample.places.tolist()
output = list(range(first.output_ids.size)), list(range(second.output_ids.size))
assert places == [*output[0], *[-1] * second.context_ids.size, *output[1]], places

told = sample_to_json(sample)
for again in (sample_from_json(json.loads(json.dumps(told))), sample_from_binary(sample_to_binary(sample))):
    assert (again.places.tolist(), again.places.dtype.name) == (places, "int32")
write_parquet([sample], Path("samples.parquet"))
assert pyarrow.parquet.read_table("samples.parquet")["places"].to_pylist() == [places]
assert cut_columns(sample, 3)["places"].tolist() == places[:3]
assert trainer_columns(sample)["places_in_turn"].tolist() == places
del told["places"]
try:
    sample_from_json(told)
except RunError as error:
    assert "places" in error.message
else:
    raise AssertionError("a sample without the column")
"""


HOW_TOS = (
    HowTo(
        "(a) Add a dialect",
        3,
        DIALECT,
        TRY_DIALECT,
        {
            "harness/dialects/toy_request.py": "tests/unit/dialects/toy_request.py",
            "harness/dialects/toy.py": "tests/unit/dialects/toy_dialect.py",
        },
    ),
    HowTo(
        "(b) Add an engine",
        3,
        ENGINE,
        TRY_ENGINE,
        {"harness/engines/remote/toy.py": "tests/unit/engines/toy_provider.py"},
    ),
    HowTo("(c) Add a gate verb", 4, VERB, TRY_VERB),
    HowTo("(d) Add a sample column", 3, COLUMN, TRY_COLUMN),
)


@pytest.mark.parametrize("how_to", HOW_TOS, ids=[each.title for each in HOW_TOS])
def test_what_the_page_says_is_enough(tmp_path: Path, how_to: HowTo) -> None:
    """It works end to end after changes to the few files that the page names."""
    copied = shutil.copytree(ROOT / "harness", tmp_path / "harness")
    for name, toy in how_to.added.items():
        text = (ROOT / toy).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("from tests.unit.dialects.", "from harness.dialects."))
    for name, inserted in how_to.inserted.items():
        file = tmp_path / name
        text = file.read_text(encoding="utf-8")
        for before, new in inserted.items():
            assert text.count(before) == 1, f"{name} has {before!r} {text.count(before)} times"
            text = text.replace(before, new + before)
        file.write_text(text, encoding="utf-8")

    check = f"import harness\nassert harness.__file__.startswith({str(copied)!r}), harness.__file__\n"
    tried = subprocess.run(
        [sys.executable, "-c", check + how_to.script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )

    assert tried.returncode == 0, tried.stderr
    changed = {*how_to.inserted, *how_to.added}
    assert changed <= _files_of(how_to.title)
    assert len(changed) <= how_to.most_files


def _files_of(title: str) -> set[str]:
    """The files of the house that a section of the page names in its list."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8").replace("NAME", "toy")
    _, text = page.split(f"## {title}\n")
    rows = [line.split(": ")[0] for line in text.split("\n## ")[0].splitlines() if line.startswith("- `")]
    return set(re.findall(r"`(harness/[^`]+)`", " ".join(rows)))
