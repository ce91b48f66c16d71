"""Examinations of engines: `doctor` of one server, `comparison` of two. Nothing in `engines` uses this package."""
