"""Ids that an engine is sent again and again: their JSON and their digest are those of the ids, however they grew."""

import json
import tracemalloc
from hashlib import blake2b

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness.sessions.token_log import TokenPath


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5), st.booleans()), max_size=20))
def test_every_path_is_written_as_its_ids(steps: list[tuple[int, int, bool]]):
    """Over trees of paths that are extended, cut, and asked for in any order and number, with earlier texts in use."""
    paths = [TokenPath.empty()]
    in_use: list[tuple[bytes | memoryview, list[int]]] = []
    for number, (parent, size, is_cut) in enumerate(steps):
        path = paths[parent % len(paths)]
        grown = path.cut(path.length // 2) if is_cut else path.extend(np.arange(number, number + size, dtype=np.int32))
        paths.append(grown)
        for each in (grown, path):
            text = each.json()
            assert json.loads(bytes(text)) == each.ids.tolist()
            if number % 2:
                in_use.append((text, each.ids.tolist()))
            del text
            assert each.digest() == blake2b(each.ids.tobytes(), digest_size=16).hexdigest()
    for text, ids in in_use:
        assert json.loads(bytes(text)) == ids


def test_a_prompt_that_is_sent_once_is_not_kept_as_text():
    """One whose next turn is a root of its own is never asked for again."""
    path = TokenPath.empty().extend(np.arange(100_000, dtype=np.int32))
    tracemalloc.start()
    try:
        assert bytes(path.json()).startswith(b"[0,1,")
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()
