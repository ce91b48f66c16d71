"""Figures."""

scalars = []


class _Tracker:
    def scalar(self, **kwargs):
        scalars.append(kwargs)


def get(name=""):
    """The tracker of that name."""
    return _Tracker()
