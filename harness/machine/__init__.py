"""This machine: processes, clocks, deadlines, connections, files, logs. Start with `deadlines.py`."""
