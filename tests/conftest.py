"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """A pool of four gloo ranks that lives as long as the test session."""
    pool = Ranks()
    yield pool
    pool.close()
