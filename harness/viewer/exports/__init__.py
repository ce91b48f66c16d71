"""A run for other programs: its figures for stores of metrics."""
