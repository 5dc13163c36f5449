"""A client's corruption stream as its adapter meets it: bytes, the right place, rendered once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedtta.client import adaptation
from fedtta.client.adaptation import batch_of, streams_of
from fedtta.client.resources import federation_of
from fedtta.data import CORRUPTIONS, corruption_streams
from fedtta.settings import Settings

SETTINGS = Settings(
    dataset="digits", fraction=0.2, image_size=16, clients=3, device="cpu", partition="iid", seed=4, severity=3,
    stream_size=20, stream_batch=10, stream_mix="dirichlet", stream_concentration=0.5, collaborations="none",
)  # fmt: skip
CPU = torch.device("cpu")


def test_the_settings_decide_the_streams() -> None:
    federation = federation_of(SETTINGS)
    expected = corruption_streams(
        federation.images, clients=3, size=20, mix="dirichlet", concentration=0.5, order=None, severity=3, batch=10,
        orders=0, seed=4,
    )  # fmt: skip
    made = streams_of(SETTINGS, federation)
    np.testing.assert_array_equal(made.lists, expected.lists)
    assert made.domains == expected.domains
    assert (made.severity, made.batch_size, made.rounds) == (3, 10, 2 * len(CORRUPTIONS))
    shuffled = streams_of(SETTINGS.replace(stream_order="shuffled", stream_orders=1), federation)
    assert (shuffled.lists != made.lists).any()
    assert len(set(shuffled.domains)) == 1
    assert len(set(made.domains)) == 3


def test_clients_of_one_process_share_them() -> None:
    federation = federation_of(SETTINGS)
    assert streams_of(SETTINGS, federation) is streams_of(SETTINGS.replace(rounds=3, methods="tent"), federation)


def test_a_batch_is_the_streams_rounded_to_bytes() -> None:
    stream = streams_of(SETTINGS, federation_of(SETTINGS))
    for client, round in ((0, 1), (2, 1), (1, 5), (1, 30)):
        x, labels, corruption = batch_of(stream, client, round, CPU)
        exact = stream.batch(client, round - 1)  # streams count from 0
        assert torch.equal(x, (exact.x * 255).round() / 255)
        np.testing.assert_array_equal(labels, exact.y.numpy())
        assert corruption == exact.corruption == stream.corruption(client, round - 1)
        assert x.shape == (10, 3, 16, 16)
        assert (x.dtype, labels.dtype) == (torch.float32, np.int64)


def test_a_batch_is_rendered_once_and_may_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = streams_of(SETTINGS, federation_of(SETTINGS))
    first, _, _ = batch_of(stream, 1, 3, CPU)
    kept = first.clone()
    first.zero_()
    with monkeypatch.context() as patched:
        patched.setattr(type(stream), "batch", None)  # nothing is corrupted again
        again, _, _ = batch_of(stream, 1, 3, CPU)
    assert torch.equal(again, kept)
    adaptation._rendered.cache_clear()
    assert torch.equal(batch_of(stream, 1, 3, CPU)[0], kept)


@pytest.mark.parametrize(("client", "round"), [(0, 0), (0, 31), (3, 1), (-1, 1)])
def test_a_place_that_is_not_in_the_stream_is_refused(client: int, round: int) -> None:
    with pytest.raises(ValueError, match=r"is not in 0\.\."):
        batch_of(streams_of(SETTINGS, federation_of(SETTINGS)), client, round, CPU)


def test_streams_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(ValueError, match="batch=15 must be at least 1 and divide size=20"):
        streams_of(SETTINGS.replace(stream_batch=15), federation_of(SETTINGS))
