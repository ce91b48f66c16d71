"""Run directory: files, configuration, lock, database. Start with `rundir.py`."""
