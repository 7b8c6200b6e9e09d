"""A pytest plugin: lazytensor's assertions as fixtures.

It stands outside of the package so that loading it imports neither torch nor lazytensor; a fixture does, when a test
asks for it.
"""

from __future__ import annotations

from typing import Any

import pytest


def _fixture(name: str) -> Any:
    def fixture() -> Any:
        from lazytensor.inspect import testing

        return getattr(testing, name)

    fixture.__doc__ = f"The context manager ``lazytensor.testing.{name}``."
    return pytest.fixture(name=name)(fixture)


no_recompile = _fixture("assert_no_recompile")
one_graph_per_step = _fixture("assert_one_graph_per_step")
no_fallback = _fixture("assert_no_fallback")
max_syncs = _fixture("assert_max_syncs")
