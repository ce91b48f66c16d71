"""A `TokenProvider` of this process, served over SGLang's native wire to whoever speaks it."""

from harness.engines.served.app import NativeServer
from harness.engines.served.serving import serve_in_process

__all__ = ["NativeServer", "serve_in_process"]
