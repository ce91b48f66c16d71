"""The run directory: files, configuration, lock and database. Runs nothing.

May use scenarios, samples and the store. Start with `rundir.py`.
"""
