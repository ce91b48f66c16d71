"""Tool call syntaxes of model families, each a `parsing.CallSyntax`. Start with `json_calls.py`."""
