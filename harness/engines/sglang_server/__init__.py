"""A `TokenProvider` of this process, served over SGLang's native wire to whoever speaks it."""

from harness.engines.sglang_server.app import NativeServer
from harness.engines.sglang_server.serve import serve_in_process

__all__ = ["NativeServer", "serve_in_process"]
