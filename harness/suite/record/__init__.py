"""Run directory: files, configuration, lock, database. May use scenarios, samples and the store.

Start with `rundir.py`.
"""
