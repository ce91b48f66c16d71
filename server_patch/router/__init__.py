"""One URL in front of an SGLang gateway and its workers: requests pass, control verbs reach every worker.

app.py           the ASGI application, which sends each request to one of the next two
passthrough.py   everything that is the gateway's: bytes in, bytes out
fan_out.py       control verbs, to every worker at once, with a report per worker
verbs.py         which calls a verb is, for SGLang and for vLLM
workers.py       who the workers are, as the gateway says
gateway.py       the gateway itself: started as a child, or a running one; what it can do
leash.py         the program that keeps the child from outliving its owner
"""

from server_patch.router.app import RouterFront
from server_patch.router.gateway import Gateway, GatewayError, GatewayKind, attach, launch
from server_patch.router.workers import Worker

__all__ = ["Gateway", "GatewayError", "GatewayKind", "RouterFront", "Worker", "attach", "launch"]
