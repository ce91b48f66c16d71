"""Exit 0 if days of all dates, and dates that do not exist, are right."""

import datetime as dt
import subprocess
import sys

sys.path.insert(0, "/app")
from calendar_days import day_of_year, days_in_month

first = dt.date(1899, 1, 1)
for offset in range(0, 80_000, 7):
    date = first + dt.timedelta(offset)
    assert day_of_year(date.year, date.month, date.day) == date.timetuple().tm_yday, date
WRONG = [(days_in_month, 2024, 0), (days_in_month, 2024, 13), (day_of_year, 2023, 2, 29), (day_of_year, 2024, 1, 0)]
for call in WRONG:
    try:
        call[0](*call[1:])
    except ValueError:
        continue
    raise AssertionError(call)
subprocess.run([sys.executable, "-m", "unittest"], cwd="/app", check=True)
