"""From groups to a flat list."""

from itertools import chain

from miles.utils.types import Sample


def postprocess_rollout_data(args, data, train_parallel_config):
    """The samples of all groups, and metadata; members of groups are samples or lists of them, all alike."""
    validate_compact_rollout_ids(data)
    while isinstance(data[0], list):
        data = list(chain.from_iterable(data))
    return data, {}


def validate_compact_rollout_ids(node, depth=0):
    """Samples of one rollout have its id."""
    if isinstance(node, Sample):
        return
    assert isinstance(node, list)
    if node and isinstance(node[0], Sample):
        ids = {sample.rollout_id for sample in node}
        assert depth < 2 or len(node) == 1 or (len(ids) == 1 and None not in ids)
        return
    for item in node:
        validate_compact_rollout_ids(item, depth + 1)
