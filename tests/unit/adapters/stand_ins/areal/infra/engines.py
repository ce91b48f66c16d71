"""The engine of a workflow, as far as an adapter asks it."""


class CountingEngine:
    """Counts versions by itself."""

    def __init__(self, version=0):
        self.version = version

    def get_version(self):
        return self.version
