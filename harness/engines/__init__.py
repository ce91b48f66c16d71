"""Engines: everything that samples tokens, behind the `TokenProvider` protocol.

Uses sessions, samples, dialects, tokens and below; never the server or the control layer. Start with `base.py`, then
`kinds.py`.
"""
