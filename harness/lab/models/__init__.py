"""Model weights: a catalogue of small models, fetched and converted. Start with `resolve.py`."""

from harness.lab.models.catalogue import CATALOGUE, CatalogueModel, GeneratedModel
from harness.lab.models.resolve import get_model, resolve_model
from harness.machine.cache import FetchPhase, FetchProgress

__all__ = ["CATALOGUE", "CatalogueModel", "FetchPhase", "FetchProgress", "GeneratedModel", "get_model", "resolve_model"]
