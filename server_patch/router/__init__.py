"""One URL in front of an SGLang gateway and its workers.

Start with `app.py`: requests pass (`passthrough.py`), control verbs reach every worker (`fan_out.py`).
"""

from server_patch.router.app import RouterFront
from server_patch.router.gateway import Gateway, GatewayError, GatewayKind, attach, launch
from server_patch.router.workers import Worker

__all__ = ["Gateway", "GatewayError", "GatewayKind", "RouterFront", "Worker", "attach", "launch"]
