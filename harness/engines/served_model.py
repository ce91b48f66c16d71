"""What an engine server serves, from `/v1/models`, which SGLang and vLLM answer alike and while paused."""

import msgspec

from harness.engines.http_client import EngineClient
from harness.errors import EngineReplyInvalid

_DEADLINE_S = 30.0


class ServedModel(msgspec.Struct, frozen=True):
    """One entry of `/v1/models`."""

    id: str
    """The name that requests ask for."""
    max_model_len: int
    """Prompt plus output, in tokens."""
    root: str = ""
    """Where its weights came from."""


class _Models(msgspec.Struct):
    data: list[ServedModel]


async def served_model(client: EngineClient) -> ServedModel:
    """The model of the server, the first one when it also serves adapters. Raises `EngineError`."""
    models = await client.get("/v1/models", _Models, deadline_s=_DEADLINE_S)
    if not models.data:
        raise EngineReplyInvalid(f"{client.name} serves no model: expected one in /v1/models, got an empty list")
    return models.data[0]
