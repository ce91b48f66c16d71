"""Data sets as rows: JSON lines, CSV, Parquet, Arrow, and folders of them. Knows no scenario. Start with `rows.py`."""
