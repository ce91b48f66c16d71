"""Model of an engine server, from `/v1/models`, alike in SGLang and vLLM, even when paused."""

import msgspec

from harness.engines.remote.http_client import EngineClient
from harness.errors import EngineReplyInvalid

SESSION_SERVER = "session-harness"
"""Owner of models listed by a session server."""

_DEADLINE_S = 30.0


class ServedModel(msgspec.Struct, frozen=True):
    """Entry of `/v1/models`."""

    id: str
    max_model_len: int = 0
    """Prompt plus output, in tokens; 0 if unknown."""
    root: str = ""
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[ServedModel]


async def find_model(client: EngineClient) -> ServedModel:
    """Return the server's first model; adapters come after it. Raises `EngineError`."""
    models = await client.get("/v1/models", _Models, deadline_s=_DEADLINE_S)
    if not models.data:
        raise EngineReplyInvalid(f"{client.name} serves no model: expected one in /v1/models, got an empty list")
    model = models.data[0]
    if model.owned_by == SESSION_SERVER:
        raise EngineReplyInvalid(f"{client.name} is a session server: name the engine behind it")
    if not model.max_model_len:
        raise EngineReplyInvalid(f"{client.name} does not say how long a prompt may be: no max_model_len in /v1/models")
    return model
