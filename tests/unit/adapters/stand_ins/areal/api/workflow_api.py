"""Workflows."""

from abc import ABC, abstractmethod


class RolloutWorkflow(ABC):
    """Makes a trajectory."""

    @abstractmethod
    async def arun_episode(self, engine, data):
        """A trajectory; None rejects it."""
