"""APIs that agents' clients speak, each translated to and from one normal form. Sans-IO.

Uses `harness.tokens`, `samples`, `types` and `errors` only. Start with `dialect.py`, the protocol and the table.
"""
