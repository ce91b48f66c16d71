"""What an offline run of Weights & Biases holds."""

import json
import struct
from collections.abc import Iterator


def wandb_values(content: bytes) -> Iterator[dict[str, float]]:
    """The values of each step and of the summary in a run file, which is a log in LevelDB's form."""
    from wandb.proto.wandb_internal_pb2 import Record

    place, part = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + 7])
        if place + 7 + size > len(content):
            return  # it is still being written
        part += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind not in (1, 4):  # a whole record, or the last part of one
            continue
        record, part = Record(), b""
        record.ParseFromString(content[place - size : place]) if kind == 1 else None
        match record.WhichOneof("record_type"):
            case "history":
                items = list(record.history.item)
            case "summary":
                items = list(record.summary.update)
            case _:
                continue
        named = [("/".join(item.nested_key) or item.key, item.value_json) for item in items]
        if record.WhichOneof("record_type") == "summary" and any(key.endswith("_step") for key, _ in named):
            continue  # what the library makes of the last step
        if told := {key: json.loads(value) for key, value in named if not key.startswith("_")}:
            yield told
