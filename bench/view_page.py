"""How the page of `harness view` is written and read: 100 sessions of 30,000 tokens each, in headless Chromium.

    python bench/view_page.py [--sessions 100] [--tokens 30000] [--json]

Written: seconds, bytes, and the most memory of the process that writes, beside that of a page of a tenth of the
sessions. Read: from the request to a list of sessions that answers, from `Enter` to the tokens of a session in sight,
from `J` to those of the next, and from `j` to the next turn; medians. Scrolled: the strip of tokens goes down by a
third of a window in each frame, and the longest time between two frames counts, the least of three passes, beside that
of an empty page that is scrolled as far; its tokens are words, and then single letters, the most elements that a window
can have. Chromium draws without a GPU, on cores that it shares with everything else that runs.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from playwright.async_api import Page

from harness.models.small_tokenizer import write_small_tokenizer
from harness.tokens.tokenizer import Tokenizer
from harness.viewer.page.run_page import write_page
from harness.viewer.run_view import RunView, SessionLine
from harness.viewer.session_view import SessionView
from tests.browser import WINDOW, browsing

_TURNS = 10
_KEYS = 30
_FRAMES = 100
_PASSES = 3
_EMPTY = "<div id=strip style='height: 400px; overflow: auto'><div style='height: 99999px'></div></div>"
_LETTERS = 97  # ids from here on are single bytes of small letters, see `small_tokenizer`
_WORDS_FROM = 259
_WORDS = [f" {first}{second}ord" for first in "bcdfghjklmnpqrstvwxyz" for second in "aeiou"]
_ON_FRAME = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"
_SCROLL = """
(frames) => new Promise((done) => {
  const strip = document.getElementById("strip");
  const times = [];
  let before = null;
  const step = (now) => {
    if (before !== null) times.push(now - before);
    before = now;
    strip.scrollTop += strip.clientHeight / 3;
    if (times.length < frames) requestAnimationFrame(step); else done(times);
  };
  requestAnimationFrame(step);
})
"""


class Bar(NamedTuple):
    """A figure, and the most that it should be."""

    name: str
    value: float
    most: float
    unit: str

    def __str__(self) -> str:
        said = "holds" if self.value <= self.most else "MISSED"
        return f"{self.name}: {self.value:,.2f} {self.unit} (wanted: <= {self.most:g}: {said})"


def make_session(number: int, tokens: int, *, of_letters: bool) -> SessionView:
    """Ten turns that go on from each other; half of their tokens are sampled."""
    chance = random.Random(number)
    each = tokens // _TURNS // 2
    first, last = (_LETTERS, _LETTERS + 20) if of_letters else (_WORDS_FROM, _WORDS_FROM + 300)
    turns = [
        {
            "turn": index,
            "parent": index - 1 if index else None,
            "status": "completed",
            "end": "model",
            "prompt_length": 2 * each * index + each,
            "output_length": each,
            "context_ids": [chance.randint(first, last) for _ in range(each)],
            "output_ids": [chance.randint(first, last) for _ in range(each)],
            "logprobs": [-chance.random() for _ in range(each)],
            "weight_versions": [{"version": str(index), "start": 0, "end": each}],
            "messages_delta": [{"role": "user", "content": "Go on."}],
            "reply": {"content": "As you wish. " * 40},
            "created_at": 1.7e9 + 10 * index,
            "seconds": 7.0,
        }
        for index in range(_TURNS)
    ]
    return SessionView.of({"session_id": f"{number:032x}", "phase": "closed", "turns": turns})


def write(path: Path, sessions: int, tokens: int) -> None:
    """Write the page, and print seconds, and the most memory that this process had before and behind it, in KiB."""
    tokenizer = Tokenizer.load(write_small_tokenizer(path.parent / "tokenizer", _WORDS))
    tokenizer.decode([_WORDS_FROM])
    view = RunView("run", [SessionLine(f"{number:032x}", number=number) for number in range(sessions)])
    began = perf_counter()

    def look_inside(session_id: str) -> SessionView:
        number = int(session_id, 16)
        return make_session(number, tokens, of_letters=number == 1)

    write_page(path, view, look_inside, tokenizer)
    seconds = perf_counter() - began
    highest = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    print(json.dumps([seconds, int(highest)]))


def written(path: Path, sessions: int, tokens: int) -> tuple[float, float]:
    """Seconds and MiB of a process that writes the page."""
    command = [sys.executable, __file__, "--write", path, "--sessions", str(sessions), "--tokens", str(tokens)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, kib = json.loads(ended.stdout)
    return seconds, kib / 1024


async def until_frame(page: Page, key: str) -> float:
    """Milliseconds from a key to the frame that shows what it did."""
    began = perf_counter()
    await page.keyboard.press(key)
    await page.evaluate(_ON_FRAME)
    return 1e3 * (perf_counter() - began)


class Scrolled(NamedTuple):
    """Milliseconds of a pass."""

    worst: float
    """Between two frames."""
    busy: float
    """Of the page's thread in a frame, on average: script, style, layout and painting."""


async def scroll(page: Page) -> Scrolled:
    """The pass that was disturbed least."""
    devtools = await page.context.new_cdp_session(page)
    await devtools.send("Performance.enable")

    async def busy_s() -> float:
        metrics = (await devtools.send("Performance.getMetrics"))["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

    passes: list[Scrolled] = []
    for _ in range(_PASSES):
        await page.evaluate("document.getElementById('strip').scrollTop = 0")
        before = await busy_s()
        worst = max(await page.evaluate(_SCROLL, _FRAMES))
        passes.append(Scrolled(worst, 1e3 * (await busy_s() - before) / _FRAMES))
    return min(passes)


async def read(path: Path) -> dict[str, float]:
    """Figures of reading the page, by their names."""
    async with browsing() as browser:
        page = await browser.new_page(viewport=WINDOW)
        await page.set_content(_EMPTY)
        empty_ms = (await scroll(page)).worst
        began = perf_counter()
        await page.goto(path.as_uri())
        await page.keyboard.press("j")
        await page.wait_for_selector("#sessions .row:nth-child(2).chosen")
        load_s = perf_counter() - began
        await page.keyboard.press("k")
        figures = {"load_s": load_s, "empty_ms": empty_ms, "open_ms": await until_frame(page, "Enter")}
        figures["words_frame_ms"], figures["words_busy_ms"] = await scroll(page)
        figures["turn_ms"] = statistics.median([await until_frame(page, "j") for _ in range(_TURNS)])
        await until_frame(page, "J")
        figures["letters_frame_ms"], figures["letters_busy_ms"] = await scroll(page)
        figures["next_ms"] = statistics.median([await until_frame(page, "J") for _ in range(_KEYS)])
        return figures


def main(asked: argparse.Namespace) -> None:
    """Write, read, and say which bars hold."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.html"
        _, small = written(path, max(1, asked.sessions // 10), asked.tokens)
        seconds, whole = written(path, asked.sessions, asked.tokens)
        size = path.stat().st_size / 2**20
        figures = asyncio.run(read(path))
    if asked.json:
        print(json.dumps({"written_s": seconds, "mib": size, "memory_mib": [small, whole], **figures}))
        return
    print(f"{asked.sessions} sessions of {asked.tokens} tokens: {size:.0f} MiB, written in {seconds:.1f} s")
    print(f"memory of the writer: {whole:.0f} MiB, of a tenth of the sessions {small:.0f} MiB")
    print(f"worst frame of an empty page: {figures['empty_ms']:.0f} ms")
    for bar in (
        Bar("memory, as a multiple of that of a tenth", whole / small, 1.25, "x"),
        Bar("opened", figures["load_s"], 2.0, "s"),
        Bar("a session opened", figures["open_ms"], 300, "ms"),
        Bar("the next session", figures["next_ms"], 300, "ms"),
        Bar("the next turn", figures["turn_ms"], 100, "ms"),
        Bar("the page's own part of a frame of words", figures["words_busy_ms"], 16, "ms"),
        Bar("the page's own part of a frame of single letters", figures["letters_busy_ms"], 16, "ms"),
        Bar("worst frame of words", figures["words_frame_ms"], 50, "ms"),
        Bar("worst frame of single letters", figures["letters_frame_ms"], 50, "ms"),
    ):
        print(bar)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write(options.write, options.sessions, options.tokens)
    else:
        main(options)
