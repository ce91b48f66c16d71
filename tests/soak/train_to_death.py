"""`harness` as a command, dead by SIGKILL just before its n-th change of a file in a folder.

    python train_to_death.py FOLDER N ARGUMENTS...

Changes are what Python announces: files opened for writing or synced, folders made, renamed and removed. The learner's
state, the lines of a step and the engine's weights are written between them, and so a death falls between two of those.
"""

import os
import signal
import sys
import threading

FOLDER, LAST = sys.argv[1], int(sys.argv[2])
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}

changes = 0
lock = threading.Lock()


def die_in_time(event: str, arguments: tuple[object, ...]) -> None:
    """An audit hook: it is called before the change."""
    global changes  # noqa: PLW0603  # a hook cannot be taken away again, so the process has one count
    if event in CHANGES and str(arguments[0]).startswith(FOLDER):
        with lock:
            changes += 1
            if changes == LAST:
                os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(die_in_time)
sys.argv[1:] = sys.argv[3:]

from harness.cli.main import main  # noqa: E402  # what it imports is read under the hook, which looks at FOLDER only

main()
