"""Figures as Prometheus gauges on a local port. `train/loss` becomes `harness_train_loss`."""

import re
from collections.abc import Mapping
from typing import Self

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from harness.errors import CannotListen

_LOOPBACK = "127.0.0.1"


class FigureGauges:
    """Context manager that serves `/metrics` on loopback; port 0 picks a free one. Raises `CannotListen`."""

    def __init__(self, port: int) -> None:
        self._wanted_port = port
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}

    def __enter__(self) -> Self:
        try:
            self._server, self._thread = start_http_server(self._wanted_port, _LOOPBACK, self._registry)
        except (OSError, OverflowError) as error:
            raise CannotListen(f"{_LOOPBACK}:{self._wanted_port}: {error}; name another port for the gauges") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def set(self, figures: Mapping[str, float]) -> None:
        """Set the current values; thread-safe."""
        for key, value in figures.items():
            if key not in self._gauges:
                name = "harness_" + re.sub(r"\W+", "_", key)
                self._gauges[key] = Gauge(name, key, registry=self._registry)
            self._gauges[key].set(value)
