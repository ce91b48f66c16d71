"""Types are read in any thread."""

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.checkout import ROOT

MADE = {
    "dataclass": ("@dataclass\nclass {}:", "{}"),
    "struct": ("class {}(msgspec.Struct):", "{}"),
    "named tuple": ("class {}(NamedTuple):", "[[]]"),
}
READ = ("read_json(json, kind)", "read_msgpack(msgspec.msgpack.encode(value), kind)", "convert(value, kind)")
PROGRAM = """
from __future__ import annotations
import sys, threading
from dataclasses import dataclass
from typing import NamedTuple
import msgspec
from harness.decoding import convert, read_json, read_msgpack

sys.setswitchinterval(1e-6)
head, json, *calls = sys.argv[1:]
value = msgspec.json.decode(json)
fields = [f"    field_{at}: int = 0" for at in range(20)]
within = "\\n".join((head.format("Within"), *fields))
source = "\\n".join((within, head.format("Kind"), "    within: Within" + " = None" * (value == {}), *fields))
for call in calls * 100:
    exec(source)
    kind, together = Kind, threading.Barrier(3)

    def read():
        together.wait()
        eval(call)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
"""


@pytest.mark.parametrize(("head", "json"), MADE.values(), ids=MADE)
def test_a_type_that_threads_read_for_the_first_time_at_once_is_read(head: str, json: str) -> None:
    """Msgspec alone ends the process with SIGSEGV within a few of these."""
    command = [sys.executable, "-c", PROGRAM, head, json, *READ]
    said = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    assert (said.returncode, said.stderr) == (0, "")


def test_no_function_calls_msgspec_with_a_type() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for room in ("harness", "server_patch")
        for path in (ROOT / room).rglob("*.py")
        if path != ROOT / "harness" / "decoding.py"
        if "msgspec" in (text := path.read_text(encoding="utf-8"))
        for call in _calls_in_functions(ast.parse(text))
        if _is_with_type(call)
    ]

    assert found == []


def _calls_in_functions(module: ast.Module) -> Iterator[ast.Call]:
    for each in ast.walk(module):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (call for call in ast.walk(each) if isinstance(call, ast.Call))


def _is_with_type(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    makes = name in ("msgspec.convert", "msgspec.json.Decoder", "msgspec.msgpack.Decoder", "json.Decoder")
    return makes or (name.endswith("decode") and any(each.arg == "type" for each in call.keywords))
