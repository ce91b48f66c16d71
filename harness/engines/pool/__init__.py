"""Several engines as one `TokenProvider`.

Uses `engines.base` and no other code for engines, so it works with any provider. Start with `pool.py`; `placement.py`
holds the decisions.
"""
