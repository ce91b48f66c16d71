"""Exit 0 if days of all dates, and dates that do not exist, are right.

The solution runs in a process of its own: it could end this one.
"""

import datetime as dt
import json
import subprocess
import sys

ASK = """
import json, sys
sys.path.insert(0, "/app")
calls = json.load(sys.stdin)
import calendar_days
answers = []
for name, *arguments in calls:
    try:
        answers.append(getattr(calendar_days, name)(*arguments))
    except ValueError:
        answers.append("ValueError")
print(json.dumps(answers))
"""
FIRST = dt.date(1899, 1, 1)
DATES = [FIRST + dt.timedelta(offset) for offset in range(0, 80_000, 7)]
WRONG = [
    ("days_in_month", 2024, 0),
    ("days_in_month", 2024, 13),
    ("day_of_year", 2023, 2, 29),
    ("day_of_year", 2024, 1, 0),
]
CALLS = [*(("day_of_year", date.year, date.month, date.day) for date in DATES), *WRONG]

asked = subprocess.run([sys.executable, "-c", ASK], input=json.dumps(CALLS), capture_output=True, check=True, text=True)
assert json.loads(asked.stdout) == [*(date.timetuple().tm_yday for date in DATES), *("ValueError" for _ in WRONG)]
subprocess.run([sys.executable, "-m", "unittest"], cwd="/app", check=True)
