"""Samples and training data, from a session's turns to packs. Pure values. Start with `merge.py`."""
