#!/bin/sh
set -e
cd /app
python3 - <<'END'
import csv
import json
from collections import Counter

totals = Counter()
with open("sales.csv", newline="") as file:
    for row in csv.DictReader(file):
        totals[row["region"].strip().lower()] += int(row["amount"].replace(",", ""))
with open("totals.json", "w") as file:
    json.dump(totals, file)
END
