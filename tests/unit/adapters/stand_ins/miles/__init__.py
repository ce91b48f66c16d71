"""A stand-in of radixark/miles 31f1ca96: the names, fields and order of events that an adapter meets, and no more.

Written from facts; `test_miles_facts.py` holds it against a table, and a checkout of miles against the same table.
"""
