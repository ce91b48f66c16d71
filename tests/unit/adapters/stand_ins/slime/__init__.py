"""A stand-in of THUDM/slime 624b824a: the names, fields and calls that an adapter meets; see `test_slime.py`."""
