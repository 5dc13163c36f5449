from __future__ import annotations

import pytest

from tests.tta.streams import Stream, make_stream


@pytest.fixture(scope="session")
def stream() -> Stream:
    return make_stream()
