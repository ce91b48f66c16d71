"""A stand-in of verl 0.9.1: the names, fields and calls that an adapter meets, and no more.

Written from facts; `tests/conformance/adapters/test_released_trainers.py` holds it, and the wheel, against a table.
"""

__version__ = "0.9.1"
