"""Tool call syntaxes of model families, each a `parsing.CallSyntax`. Start with `marked_calls.py`."""
