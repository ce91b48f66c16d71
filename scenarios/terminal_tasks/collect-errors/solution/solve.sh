#!/bin/sh
set -e
cd /app
python3 - <<'END'
from pathlib import Path

lines = [line for path in Path("logs").rglob("*.out") for line in path.read_text().splitlines()]
errors = sorted(line for line in lines if line.split()[1] == "ERROR")
Path("errors.txt").write_text("".join(f"{line}\n" for line in errors))
END
