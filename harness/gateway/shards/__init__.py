"""Several session servers behind one address: a front and its shards.

Uses `server`, `store`, `sessions` and `telemetry`. Start with `front`, then `standing`.
"""
