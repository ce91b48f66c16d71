"""A server that is looked at while it works: what has changed, for as many browsers as ask."""
