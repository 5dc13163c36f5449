"""The benchmark of noise against the reading of images: its bounds, its noise, and how strength is counted."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from fedtta.benchmarks.images import FILE, NOISES, SETTINGS, attacked_updates, change, clips, noise_of, norm, told
from fedtta.benchmarks.provenance import RESULTS
from fedtta.benchmarks.spy import watched
from fedtta.messages.replies import Trained
from fedtta.messages.requests import Train
from fedtta.privacy.gaussian import Privacy
from fedtta.server.methods import plan


def test_no_client_is_clipped_by_the_bounds_of_its_own_run() -> None:
    settings = SETTINGS.replace(rounds=1, clients=2, local_epochs=1, methods="fedavg,fedthe")
    spy, _ = watched(settings)
    norms = [
        norm(change(one.request.arrays, reply.arrays))
        for one, reply in spy.seen
        if isinstance(reply, Trained) and isinstance(one.request, Train)
    ]
    assert len(norms) == 4  # two clients, two trainings
    model, statistics = clips(settings, spy)
    assert model == max(norms)
    assert 0.1 < statistics < 10


@pytest.mark.parametrize("secure", [False, True])
def test_every_mode_is_a_run_that_can_be_planned(secure: bool) -> None:
    for z in NOISES:
        how = noise_of(z, (1 / 3, 2.0))
        plan(SETTINGS.replace(secure_aggregation=secure, differential_privacy=how))
        mechanisms = Privacy.parse(how).mechanisms
        assert {name: one.noise for name, one in mechanisms.items()} == {"model": z, "statistics": z}
        assert mechanisms["model"].clip >= 1 / 3 - 1e-4


def test_an_image_among_decoys_is_lost_in_noise_step_by_step() -> None:
    (update,) = attacked_updates("decoys")  # which have to pass the default rules
    assert norm(update.change) == pytest.approx(1)
    gaps = [told([update], z)["decoys"] for z in (0, 0.01, 0.03, 0.1, 0.3)]
    assert gaps[0] > 0.85
    assert all(one > other for one, other in pairwise(gaps[:4]))
    assert max(gaps[-2:]) < 0.1


def test_the_kept_table_says_what_the_pages_say() -> None:
    """The least noise that hides an image whatever the weights costs far more than a point; 0.01 hides no image."""
    rows = {row["mode"]: row for row in json.loads((RESULTS / FILE).read_text())["modes"]}
    methods = [key for key in rows["none"] if key.startswith("accuracy")]
    costs = {mode: np.mean([rows["none"][key] - row[key] for key in methods]) for mode, row in rows.items()}
    assert costs["noise 0.3"] > 20
    assert max(value for key, value in rows["noise 0.3"].items() if key.startswith("told")) < 0.1
    assert rows["noise 0.01"]["told ordinary"] < 0.1
    assert rows["noise 0.01"]["told decoys"] > 0.5
