"""Where the checkout is whose code the tests run."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
