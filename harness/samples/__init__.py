"""Samples and training data, from the turns of a session to packs.

Pure values; may use only `types`, `turn_ends` and `errors`. Start with `merge.py`.
"""
