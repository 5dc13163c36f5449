"""Arrays by reference: the same values whatever their order in memory, in the network's own, and without copies."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as drawn
from numpy.typing import NDArray

from messages.layout import as_held, packed, unpacked
from models import build

ARRAYS = st.sampled_from(["f4", "f8", "i8"]).flatmap(
    lambda kind: drawn.arrays(kind, drawn.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4))
)


@given(value=ARRAYS, held=st.booleans(), order=st.sampled_from("CF"))
def test_what_is_unpacked_has_the_values_that_were_packed(value: NDArray, held: bool, order: str) -> None:
    given_value = np.asarray(value, order=order)
    given_value = as_held(given_value) if held else given_value
    (sent, _) = packed({"a": given_value})["a"]
    assert sent.flags.c_contiguous
    back = unpacked(packed({"a": given_value}))["a"]
    assert (back.shape, back.dtype) == (value.shape, value.dtype)
    np.testing.assert_array_equal(back, value)


@given(value=ARRAYS)
def test_arrays_as_networks_hold_them_are_packed_without_a_copy(value: NDArray) -> None:
    held = as_held(value)
    if value.size:
        assert np.shares_memory(unpacked(packed({"a": held}))["a"], held)


def test_it_is_the_order_of_a_client_s_network() -> None:
    network = build("cnn", 10, seed=0).to(memory_format=torch.channels_last)
    for name, value in network.global_state().items():
        own = value.numpy()
        assert np.shares_memory(as_held(own), own), name
