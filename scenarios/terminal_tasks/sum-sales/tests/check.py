"""Exit 0 if totals.json has the sums."""

import json
from pathlib import Path

assert json.loads(Path("/app/totals.json").read_text()) == {"north": 20, "south": 1230, "east": 5}
