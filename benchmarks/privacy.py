"""`privacy`: what a client's messages tell of its class mix, and what secure aggregation and noise cost.

The attacker is the server, or one who reads what it receives. It knows the model, the settings and the noise, and has
labelled images of the same kind (here the pooled test samples).

- Statistics: a client's descriptor and DLE are mixtures of the classes' means, so the class mix is estimated by the
  best linear estimator (Bayes with a Dirichlet prior and the known noise).
- Models: the bias of the head moves with the class frequencies (label distribution from gradients: "User-level label
  leakage from gradients in federated learning", Wainakh et al., PETS 2022); round 1 tells most.

Under secure aggregation the attacker reads a client's own message the same way, masked as it is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from fedtta.benchmarks import images
from fedtta.benchmarks.clients import client_of
from fedtta.benchmarks.provenance import RESULTS, provenance, write_json
from fedtta.benchmarks.spy import accuracy, mean_of, watched
from fedtta.client.resources import federation_of
from fedtta.messages.replies import Reply, Summarized, Trained
from fedtta.messages.requests import Request, Summarize, Train
from fedtta.messages.transport import Addressed
from fedtta.privacy import masking
from fedtta.privacy.gaussian import Privacy
from fedtta.settings import Settings, SettingsError, from_arguments
from fedtta.settings import add_arguments as settings_arguments
from fedtta.tta.statistics import discretise

FILE = "privacy.json"
Float = NDArray[np.float64]
Number = TypeVar("Number", int, float)
#: The settings whose numbers are kept.
SETTINGS = Settings(
    clients=10,
    rounds=10,
    local_epochs=2,
    image_size=16,
    momentum=0.9,
    methods="fedavg,fedthe,btfl",
    shifts="original,out_of_client",
    engine="vectorised",
    device="cpu",
)
CLIP = 0.25  # of statistics, root mean square
NOISES = (0.9, 4.0)  # of two statistics rounds: ε = 7.5 and 1.4


def modes(noises: Sequence[float], clip: float = CLIP) -> dict[str, dict[str, Any]]:
    """Return name → changes of the settings."""
    found: dict[str, dict[str, Any]] = {"none": {}, "secure": {"secure_aggregation": True}}
    for noise in noises:
        found[f"noise {noise:g}"] = {"differential_privacy": f"statistics={noise:g}/{clip:g}"}
    for noise in noises:
        found[f"secure, noise {noise:g}"] = {**found["secure"], **found[f"noise {noise:g}"]}
    found["secure, noise 4, model 2.2"] = {
        **found["secure"],
        "differential_privacy": f"statistics=4/{clip:g};model=2.2/0.5",
    }
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `privacy`, and those of all settings, whose defaults are `SETTINGS`."""
    about = "what is attacked: the class mix of clients, or single images (default: %(default)s)"
    parser.add_argument("--part", choices=("mix", "images"), default="mix", help=about)
    parser.add_argument("--seeds", default="1,2,3", metavar="N,N")
    parser.add_argument("--noise", default="", metavar="Z,Z", help="of the statistics; images: of models as well")
    parser.add_argument("--clip", type=float, default=CLIP, help="of the statistics; mix only (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="NAME;NAME", help="of the modes; mix only (default: all)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"default: {FILE} or {images.FILE} of the kept results"
    )
    settings_arguments(parser)


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure every mode over all seeds, print and keep the table.

    Raises
    ------
    SettingsError, RunError
        As a run.
    """
    about_images = arguments.part == "images"
    settings = from_arguments(arguments, (images.SETTINGS if about_images else SETTINGS).flat())
    noises = _numbers("noise", arguments.noise, float)
    seeds = _numbers("seeds", arguments.seeds, int)
    if not seeds:
        raise SettingsError("--seeds: allowed are one or more, separated by commas")
    title = f"{settings.dataset}, {settings.clients} clients"
    if about_images:
        rows, title = images.measure(settings, noises or images.NOISES, seeds), f"Single images: {title}"
    else:
        rows = _mixes(settings, modes(noises or NOISES, arguments.clip), arguments.only, seeds)
    changed = {key: value for key, value in settings.flat().items() if value != Settings().flat()[key]}
    content = {"title": title, **provenance(), "settings": changed, "seeds": seeds, "modes": rows}
    console.print(rendered(rows))
    path = arguments.out or RESULTS / (images.FILE if about_images else FILE)
    console.print(f"Written: {write_json(path, content)}", highlight=False)


def _numbers(key: str, text: str, kind: type[Number]) -> list[Number]:
    """Return the numbers of an argument, which are separated by commas."""
    try:
        return [kind(one) for one in text.split(",") if one]
    except ValueError as error:
        raise SettingsError(f"--{key} {text!r}: allowed are numbers, separated by commas") from error


def _mixes(
    settings: Settings, chosen: dict[str, dict[str, Any]], only: str, seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the rows of the table of class mixes: the modes of a list of names, or all."""
    names = [one for one in only.split(";") if one] or list(chosen)
    if unknown := [name for name in names if name not in chosen]:
        raise SettingsError(f"--only {';'.join(unknown)}: allowed are {'; '.join(chosen)}")
    rows = []
    for name in names:
        found = [measure(settings.replace(seed=seed, **chosen[name])) for seed in seeds]
        rows.append({"mode": name, **{key: mean_of([one[key] for one in found]) for key in found[0]}})
    return rows


def measure(settings: Settings) -> dict[str, float | None]:
    """Run once and return accuracies (%), what the attacks find, ε, seconds and bytes a client and round sends."""
    start = time.perf_counter()
    spy, events = watched(settings)
    seconds = time.perf_counter() - start
    mixes = federation_of(settings).class_counts().astype(np.float64)
    mixes /= mixes.sum(1, keepdims=True)
    statistics = [one for one in spy.seen if isinstance(one[1], Summarized)]
    models = [one for one in spy.seen if isinstance(one[1], Trained) and getattr(one[0].request, "round", 0) == 1]
    by_statistics = _attacked(statistics, mixes, StatisticsAttack(settings, mixes.shape[1]))
    by_models = _attacked(models, mixes, from_model)
    rounds = [event for event in events if event["event"] == "round"]
    spent = [event["epsilon"] for event in events if event["event"] == "privacy"]
    return {
        **{f"accuracy {name}": accuracy(events, name) for name in ("fedavg", "fedthe", "btfl")},
        "statistics r": by_statistics[0],
        "statistics largest": by_statistics[1],
        "model r": by_models[0],
        "model largest": by_models[1],
        "epsilon": spent[0] if spent else None,
        "seconds": seconds,
        "kilobytes": float(np.mean([one["bytes_up"] / len(one["replied"]) for one in rounds])) / 1000
        if rounds
        else None,
    }


@dataclass
class StatisticsAttack:
    """Estimates a client's class mix [K] from its statistics: the best linear estimate under a Dirichlet prior.

    Parameters
    ----------
    settings : Settings
    classes : int
    """

    settings: Settings
    classes: int
    _gains: dict[str, tuple[Float, Float]] = field(default_factory=dict)

    def __call__(self, request: Request, reply: Reply) -> Float:
        """Return the estimate."""
        assert isinstance(request, Summarize)
        if request.task.training not in self._gains:  # one model for all clients
            self._gains[request.task.training] = self._gain(request)
        gain, middle = self._gains[request.task.training]
        return 1 / self.classes + gain @ (statistics_in(reply, len(middle) // 2) - middle)

    def _gain(self, request: Summarize) -> tuple[Float, Float]:
        """Return the estimator's matrix [K, 2 d], and the statistics of equal classes [2 d]."""
        device = client_of(self.settings.replace(secure_aggregation=False, differential_privacy=""), 0)
        device.model.load_global_state({name: torch.tensor(value) for name, value in request.arrays.items()})
        features, spread = _class_means(self.settings, device)  # [2 d, K], [2 d]
        k = self.classes
        prior = (np.eye(k) - 1 / k) / k / (1 + self.settings.alpha * k)  # covariance of a Dirichlet's draws
        noise = np.full(len(features), 1e-4) + spread / 50
        if mechanism := Privacy.parse(self.settings.differential_privacy).mechanisms.get("statistics"):
            noise += (mechanism.noise * mechanism.clip) ** 2 * 4 * (len(features) // 2)  # four arrays
        gain = prior @ features.T @ np.linalg.inv(features @ prior @ features.T + np.diag(noise))
        return gain, features.mean(1)


def statistics_in(reply: Reply, size: int) -> Float:
    """Return descriptor and DLE as a message shows them [2 d]; under masks, the first numbers of the vector."""
    assert isinstance(reply, Summarized)
    if reply.masked:
        return _read_masked(reply)[: 2 * size]
    return np.concatenate([reply.statistics["descriptor"], reply.statistics["dle"]])


def from_model(request: Request, reply: Reply) -> Float:
    """Return how the bias of the head moved [K], or the numbers in its place under masks."""
    assert isinstance(reply, Trained)
    assert isinstance(request, Train)
    arrays = request.arrays
    name = next(name for name in arrays if name.endswith("head.bias") and "rotation" not in name)
    if reply.masked:
        start = sum(arrays[other].size for other in sorted(arrays) if other < name)
        return _read_masked(reply)[start : start + arrays[name].size]
    return reply.arrays[name].astype(np.float64) - arrays[name]


def _read_masked(reply: Reply) -> Float:
    """Return a masked vector as the numbers that it would be without masks, scaled to what such numbers are."""
    assert isinstance(reply, Trained | Summarized)
    assert reply.masked
    return masking.decode(reply.masked["sum"], 62) / 2  # in [-1, 1)


def _class_means(settings: Settings, device: Any) -> tuple[Float, Float]:
    """Return the classes' means of features and of ẑ = 0 over public images [2 d, K], and the mean variance [2 d]."""
    federation = federation_of(settings)
    index = np.concatenate([split.test for split in federation.splits])
    labels = federation.images.labels[index]
    with torch.no_grad():
        x = federation.images.pixels[index]
        z = device.model.features(torch.as_tensor(x).float() / 255).double()
    values = torch.cat([z, (discretise(z) <= 0).double()], 1).numpy()
    classes = federation.images.num_classes
    means = np.stack([values[labels == k].mean(0) if (labels == k).any() else values.mean(0) for k in range(classes)])
    return means.T, (values - means[labels]).var(0)


def _attacked(
    seen: Sequence[tuple[Addressed, Reply]], mixes: Float, attack: Callable[[Request, Reply], Float]
) -> tuple[float | None, float | None]:
    """Return the correlation of estimated and true class mixes, and the part of clients whose largest class is right.

    None where no such message was seen.

    Each client's messages of all trainings are averaged: node ids are partitions plus one.
    """
    if not seen:
        return None, None
    found: dict[int, list[Float]] = {}
    for one, reply in seen:
        found.setdefault(one.node - 1, []).append(attack(one.request, reply))
    estimates = np.stack([np.mean(found[partition], 0) for partition in sorted(found)])
    truth = mixes[sorted(found)]
    right = float((estimates.argmax(1) == truth.argmax(1)).mean())
    return float(np.corrcoef(estimates.ravel(), truth.ravel())[0, 1]), right


def rendered(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows as a table for the terminal."""
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    return table
