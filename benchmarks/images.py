"""`privacy --part images`: what an update with noise tells of single training images, and what the noise costs.

Costs: runs with noise `model=z/C;statistics=z/S`, where C is the largest norm of an update and S the largest root mean
square of a statistic's distance from the middle of its range, both in the same seed's run without noise: no honest
client is clipped.

Attacks: an update of the CNN (32 pixels) on images of noise, of which none is like another, at weights that the default
policy lets pass, scaled to the clip. The number is how much more the best row of the linear layer's update correlates
with the input of a trained image than with that of an unseen one (see `fedtta.benchmarks.reconstruction.gap`).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta.benchmarks.clients import client_of
from fedtta.benchmarks.reconstruction import SIZE, chosen_weights, decoyed_weights, gap, initial_weights, trap
from fedtta.benchmarks.spy import Spy, accuracy, mean_of, watched
from fedtta.client.policy import Policy
from fedtta.client.privacy import middle
from fedtta.messages.arrays import Arrays
from fedtta.messages.replies import Summarized, Trained
from fedtta.messages.requests import Train, TrainingTask
from fedtta.server.events import Event
from fedtta.server.privacy import threshold
from fedtta.settings import Settings, to_json

FILE = "privacy-images.json"
#: The settings whose numbers are kept.
SETTINGS = Settings(
    clients=10,
    partition="iid",
    rounds=6,
    local_epochs=2,
    image_size=16,
    channels=1,
    momentum=0.9,
    methods="fedavg,fedthe,btfl",
    shifts="original",
    engine="vectorised",
    device="cpu",
)
NOISES = (0.01, 0.03, 0.1, 0.3)
METHODS = ("fedavg", "fedthe", "btfl")
IMAGES = 1000  # of noise, of which about 60 % are trained on
DRAWS = 3  # of the noise, and networks of ordinary weights


def measure(settings: Settings, noises: Sequence[float], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rows of the table: a mode without noise, then each z without and with secure aggregation."""
    sharing = threshold(settings, settings.clients)
    updates = attacked_updates()
    plain = [watched(settings.replace(seed=seed)) for seed in seeds]
    bounds = [clips(settings.replace(seed=seed), spy) for seed, (spy, _) in zip(seeds, plain, strict=True)]
    rows = [_row("none", [events for _, events in plain], bounds, told(updates, 0.0))]
    for secure in (False, True):
        for z in noises:
            found = [
                watched(settings.replace(seed=seed, secure_aggregation=secure, differential_privacy=noise_of(z, bound)))
                for seed, bound in zip(seeds, bounds, strict=True)
            ]
            # of a client whose fellow members the server has invented, it reads the client's own part of the noise
            single = z / math.sqrt(sharing) if secure else z
            name = f"secure, noise {z:g}" if secure else f"noise {z:g}"
            rows.append(_row(name, [events for _, events in found], bounds, told(updates, single)))
    return rows


def _row(
    mode: str, runs: Sequence[Sequence[Event]], bounds: Sequence[tuple[float, float]], gaps: Mapping[str, float]
) -> dict[str, Any]:
    costs = {f"accuracy {name}": mean_of([accuracy(events, name) for events in runs]) for name in METHODS}
    read = {f"told {name}": value for name, value in gaps.items()}
    return {"mode": mode, "seeds": len(runs), **costs, "clip": mean_of([model for model, _ in bounds]), **read}


def noise_of(z: float, bounds: tuple[float, float]) -> str:
    """Return the setting `differential-privacy` of z with the bounds of models and statistics."""
    return f"model={z:g}/{bounds[0]:.4g};statistics={z:g}/{bounds[1]:.4g}"


def clips(settings: Settings, spy: Spy) -> tuple[float, float]:
    """Return the largest norm of an update, and root mean square of a statistic, among what arrived."""
    device = client_of(settings, 0)
    norms, sizes = [], []
    for one, reply in spy.seen:
        if isinstance(reply, Trained) and isinstance(one.request, Train):
            norms.append(norm(change(one.request.arrays, reply.arrays)))
        elif isinstance(reply, Summarized):
            away = [value - middle(name, value.size, device) for name, value in reply.statistics.items()]
            sizes.append(max(math.sqrt(float((one**2).mean())) for one in away))
    return max(norms), max(sizes)


def change(before: Arrays, after: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float64]]:
    """Return after - before, in float64."""
    return {name: np.float64(after[name]) - before[name] for name in before}


def norm(arrays: Mapping[str, NDArray[np.float64]]) -> float:
    """Return the l2 norm of all arrays together."""
    return math.sqrt(sum(float((one**2).sum()) for one in arrays.values()))


@dataclass(frozen=True)
class Update:
    """An update that a client sends without noise: its name in the table, the weights, and the change, of norm 1."""

    name: str
    before: Arrays
    change: Mapping[str, NDArray[np.float64]]
    members: NDArray[np.uint8]
    others: NDArray[np.uint8]


def attacked_updates(only: str = "") -> list[Update]:
    """Return the updates that are read, all or those of one name, each of which the default policy lets leave."""
    draw, found = np.random.default_rng(1), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "noise.npz"
        np.savez(path, x=draw.integers(0, 256, (IMAGES, 1, SIZE, SIZE), np.uint8), y=np.arange(IMAGES) % 10)
        run = Settings(
            clients=1, dataset="npz", data_dir=folder, dataset_options=f"path={path}", partition="iid", image_size=SIZE,
            normalization="half", augment=False, local_epochs=1, batch_size=IMAGES, personal_epochs=0,
            learning_rate=0.1, weight_decay=0.0, device="cpu",
        )  # fmt: skip
        device = client_of(run, 0)
        split, pixels = device.federation.splits[0], device.federation.images.pixels
        members, others = pixels[split.train], pixels[np.concatenate([split.validation, split.test])][:200]
        cases: list[tuple[str, Arrays, dict[str, Any]]] = [
            *(("ordinary", initial_weights(seed), {"batch_size": 512}) for seed in range(DRAWS)),
            ("most", trap(members, len(members) * 4 // 5), {"batch_size": 512}),
            ("batches of 8", chosen_weights(), {"batch_size": 8}),
            ("decoys", decoyed_weights(members), {}),
        ]
        for name, weights, changes in [case for case in cases if only in ("", case[0])]:
            text = to_json(run.replace(**changes))
            device = client_of(run.replace(**changes), 0)
            request = Train(round=1, task=TrainingTask("t"), arrays=weights, settings=text, run="benchmark")
            Policy().check_effective(request, *device.effective_samples(request))
            moved = change(weights, device.train(request).arrays)
            size = norm(moved)
            found.append(Update(name, weights, {k: v / size for k, v in moved.items()}, members, others))
    return found


def told(updates: Sequence[Update], z: float) -> dict[str, float]:
    """Return, by name, how much more of an image these updates tell with noise z: mean over draws, worst network."""
    found: dict[str, float] = {}
    for one in updates:
        gaps = []
        for seed in range(DRAWS if z else 1):
            draw = np.random.default_rng(seed)
            noisy = {k: one.before[k] + v + z * draw.standard_normal(v.shape) for k, v in one.change.items()}
            gaps.append(gap(one.before, noisy, one.members, one.others))
        found[one.name] = max(found.get(one.name, -1.0), round(float(np.mean(gaps)), 3))
    return found
