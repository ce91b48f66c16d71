"""Several engines as one `TokenProvider`; knows `engines.base` only. Start with `pool.py`; `placement.py` decides."""
