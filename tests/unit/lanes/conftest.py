"""Engines that are installed as programs which play them."""

from tests.fake_engines.installed_lanes import _cache, _installed, _spec, _weights

__all__ = ["_cache", "_installed", "_spec", "_weights"]
