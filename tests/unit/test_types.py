"""The values every layer speaks are never written to."""

import numpy as np

from harness.types import as_ids, as_logprobs


def test_columns_are_read_only_and_leave_the_callers_array_alone():
    """Somebody else's buffer stays writable; what we hold does not."""
    ids, logprobs = np.zeros(3, np.int32), np.zeros(3, np.float32)
    columns = as_ids(ids), as_logprobs(logprobs)

    assert [column.flags.writeable for column in columns] == [False, False]
    assert [array.flags.writeable for array in (ids, logprobs)] == [True, True]
