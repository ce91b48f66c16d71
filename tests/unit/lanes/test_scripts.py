"""What counts as a script of tokens is the same for both engines."""

import pytest

from server_patch.force_tokens.script import read_script


@pytest.mark.parametrize("parameters", [None, {}, {"force_ids": None}, {"force_ids": []}, {"repeat_prefix_len": 3}])
def test_most_requests_have_none(parameters: object) -> None:
    assert read_script(parameters, vocab_size=10) == ()


def test_a_list_of_ids_is_one() -> None:
    assert read_script({"force_ids": [3, 1, 3]}, vocab_size=4) == (3, 1, 3)


@pytest.mark.parametrize("script", ["12", 3, [1, "2"], [True], [-1], [1.0], {"0": 1}])
def test_anything_else_is_refused(script: object) -> None:
    with pytest.raises(ValueError, match="force_ids: expected a list of token ids, got"):
        read_script({"force_ids": script})


def test_an_id_that_nobody_has_is_refused_where_the_vocabulary_is_known() -> None:
    with pytest.raises(ValueError, match="token id 4 is out of vocabulary, which has 4"):
        read_script({"force_ids": [0, 4]}, vocab_size=4)
