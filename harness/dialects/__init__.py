"""APIs that agents' clients speak, each translated to and from one normal form, without I/O.

Uses `harness.tokens` and the modules below it. Start with `dialect.py`: the protocol and the table.
"""
