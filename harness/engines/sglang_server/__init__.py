"""Any `TokenProvider` under SGLang's native protocol, without session server. Start with `app.py`."""

from harness.engines.sglang_server.app import NativeServer
from harness.engines.sglang_server.serving import serve_in_process

__all__ = ["NativeServer", "serve_in_process"]
