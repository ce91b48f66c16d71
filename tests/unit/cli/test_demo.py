"""The first command of somebody who has installed nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli.demo import demo
from harness.errors import RunError
from harness.tokens.tokenizer import Tokenizer
from harness.viewer.look import look_at, look_into

HEAVY = ["torch", "transformers", "openai", "pyarrow"]
NOBODY = "http://127.0.0.1:9"
PROGRAM = f"""
import sys
from pathlib import Path
from harness.cli.demo import demo
demo(out=Path(sys.argv[1]), as_json=True)
assert not [each for each in {HEAVY} if each in sys.modules]
"""


def test_a_session_is_aborted_and_goes_on_where_it_was_cut(tmp_path: Path):
    """Without a model and what runs one; the tokens of the turn that was cut are in the session that took it over.

    A proxy of the machine is not asked for what is on it.
    """
    out = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(out)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "HTTP_PROXY": NOBODY, "http_proxy": NOBODY, "NO_PROXY": "", "no_proxy": ""},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    view = look_into(out / "sessions.db", found["session_id"])
    reads = Tokenizer.load(Path(found["tokenizer"]))
    texts = ["".join(str(token.text) for token in turn.tokens(reads)) for turn in view.turns]

    assert [json.loads(text.split("\n")[1])["arguments"]["number"] for text in texts] == [10, 16, 4, 17, 12]
    assert [turn.attempts for turn in view.turns] == [1, 1, 2, 1, 1]
    assert view.ledger["dropped"] == {}
    assert len(look_at(out / "sessions.db").sessions) == 5
    with pytest.raises(RunError, match="look at it with `harness show"):
        demo(out=out)
