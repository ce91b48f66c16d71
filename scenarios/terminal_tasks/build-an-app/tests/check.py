"""Exit 0 if the built program works where its source is not."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    built = shutil.copy("/app/dist/greet.pyz", folder)

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, built, *arguments]
        done = subprocess.run(command, capture_output=True, check=False, text=True, cwd=folder)
        return done.returncode, done.stdout

    assert run("Ada") == (0, "Hello, Ada!\n")
    assert run("--version") == (0, "1.4.2\n")
    assert run() == (2, "")
assert "1.4.2" not in Path("/app/greet/cli.py").read_text()
