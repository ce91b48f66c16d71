"""Exit 0 if errors.txt has the four error lines in order."""

from pathlib import Path

EXPECTED = """\
2026-01-02T10:00:00 ERROR worker 2: no queue
2026-01-02T10:00:02 ERROR worker 1: job 17 failed
2026-01-02T10:00:03 ERROR api: upstream timed out
2026-01-02T10:00:07 ERROR worker 2: out of memory
"""

assert Path("/app/errors.txt").read_text() == EXPECTED
