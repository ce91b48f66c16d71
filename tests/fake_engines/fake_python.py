"""Stands where the interpreter of an engine's environment is, and plays the server that it is asked to run.

What it does is said by `FAKE_ENGINE`: `serve`, `die` (a wrong argument), `busy` (never answers 200). A server has a
child in its group, as real ones do. Never imported; started as the executable that a lane runs.
"""

import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    """Answers every request alike."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(503 if os.environ["FAKE_ENGINE"] == "busy" else 200)
        self.end_headers()


def main() -> None:
    arguments = sys.argv[1:]
    print("started as", arguments, flush=True)
    if os.environ["FAKE_ENGINE"] == "die":
        sys.exit("vllm serve: error: unrecognized arguments: --no-such-flag")
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()


main()
