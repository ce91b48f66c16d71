"""Figures on a page that Prometheus reads."""

import threading

import httpx
import pytest

from harness.errors import CannotListen
from harness.server.telemetry.metrics import FigureGauges
from tests.free_ports import free_ports


def test_the_page_has_the_last_figures():
    """By name, as gauges."""
    with FigureGauges(0) as gauges:
        gauges.set({"train/loss": 1.5, "rollout_seed_base": 2**62})
        gauges.set({"train/loss": 0.25})
        page = httpx.get(f"http://127.0.0.1:{gauges.port}/metrics", timeout=30).text

    assert "harness_train_loss 0.25\n" in page
    assert "harness_rollout_seed_base 4.6" in page


def test_it_ends_with_its_block_and_leaves_nothing():
    """Neither a thread nor a port that is taken."""
    before = set(threading.enumerate())
    port = free_ports()
    with FigureGauges(port):
        pass
    assert set(threading.enumerate()) <= before
    with FigureGauges(port) as again:
        assert again.port == port


def test_a_port_that_is_taken_is_named():
    """With the remedy."""
    with FigureGauges(0) as first, pytest.raises(CannotListen, match=f"127.0.0.1:{first.port}: .*name another port"):
        FigureGauges(first.port).__enter__()
