"""A federated job in plain PyTorch, and its simulation by pfl-research as a script: `python -P pfl_app.py JOB RESULT`.

`fedtta.benchmarks.speed.simulators` measures ours beside it. The script runs in an environment of its own, with the
package `pfl`, so it imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

INITIAL = "initial."  # begins the names of the initial weights


class Network(nn.Module):
    """The papers' CNN, with the names of our global state.

    Parameters
    ----------
    weights : mapping
        Name → array; they decide the sizes of the layers.
    mean, std : sequence of float
        Of each channel.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, weights: Mapping[str, np.ndarray], mean: np.ndarray, std: np.ndarray) -> None:
        super().__init__()
        shapes = {name.split(".")[-2]: value.shape for name, value in weights.items() if name.endswith("weight")}
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for index in (1, 2):
            maps, channels, side, _ = shapes[f"conv{index}"]
            layers[f"conv{index}"] = nn.Conv2d(channels, maps, side)
            layers[f"relu{index}"] = nn.ReLU()
            layers[f"pool{index}"] = nn.MaxPool2d(2)
        layers["flatten"] = nn.Flatten()
        layers["fc1"] = nn.Linear(*reversed(shapes["fc1"]))
        layers["relu3"] = nn.ReLU()
        self.encoder = nn.ModuleDict({"body": nn.Sequential(layers)})
        self.head = nn.Linear(*reversed(shapes["head"]))
        for name, value in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32).view(-1, 1, 1), persistent=False)
        self.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, K] of images [B, C, H, W] in [0, 1]."""
        return self.head(self.encoder["body"]((x - self.mean) / self.std))

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return cross_entropy(self(x), labels)

    @torch.no_grad()
    def correct(self, x: Tensor, labels: Tensor) -> int:
        """Return the number of correct predictions."""
        return int((self(x).argmax(1) == labels).sum())


@dataclass(frozen=True)
class Client:
    """Pixels (uint8) and labels of a client, for training and for validation."""

    pixels: Tensor
    labels: Tensor
    held_pixels: Tensor
    held_labels: Tensor

    def ordered(self, order: Tensor) -> tuple[Tensor, Tensor]:
        """Return the training images in [0, 1] and their labels in the order of an epoch."""
        return self.pixels[order].float() / 255, self.labels[order]

    @property
    def held_out(self) -> tuple[Tensor, Tensor]:
        """The validation images in [0, 1] and their labels."""
        return self.held_pixels.float() / 255, self.held_labels


@dataclass(frozen=True)
class Job:
    """Clients, weights and what is done in each round: one epoch of SGD in a given order, averaged by samples.

    Parameters
    ----------
    clients : tuple of Client
    orders : tuple of tuple of Tensor
        Of each round and client: the order of its training images.
    weights : dict
    mean, std : ndarray [C]
    lr : float
    batch : int
    """

    clients: tuple[Client, ...]
    orders: tuple[tuple[Tensor, ...], ...]
    weights: dict[str, np.ndarray]
    mean: np.ndarray
    std: np.ndarray
    lr: float
    batch: int

    def network(self) -> Network:
        """Return the network with the initial weights."""
        return Network(self.weights, self.mean, self.std)


@lru_cache(maxsize=1)
def read(path: str) -> Job:
    """Read a job that `fedtta.benchmarks.speed.simulators.write_job` has written."""
    with np.load(path, allow_pickle=False) as file:
        stored = dict(file.items())

    def divided(name: str, sizes: str) -> list[Tensor]:
        return list(torch.from_numpy(stored[name]).split(stored[sizes].tolist()))

    train, held = "train_sizes", "validation_sizes"
    parts = (("train_pixels", train), ("train_labels", train), ("validation_pixels", held), ("validation_labels", held))
    clients = tuple(Client(*one) for one in zip(*(divided(*part) for part in parts), strict=True))
    orders = tuple(tuple(torch.from_numpy(one).split(stored[train].tolist())) for one in stored["orders"])
    weights = {name.removeprefix(INITIAL): value for name, value in stored.items() if name.startswith(INITIAL)}
    return Job(clients, orders, weights, stored["mean"], stored["std"], float(stored["lr"]), int(stored["batch"]))


def simulate(job: Job, validate: bool) -> tuple[list[float], dict[str, np.ndarray]]:
    """Simulate a job with pfl-research in this process; return the seconds of each round, and the final weights.

    Parameters
    ----------
    validate : bool
        Each client evaluates the received network on its validation images first, as ours do.
    """
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Measured(Network):
        def metrics(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
            return {"accuracy": Weighted(self.correct(x, labels), len(labels))}

    class Validated(FederatedAveraging):
        def train_one_user(self, initial: Any, model: Any, user: Any, context: Any) -> Any:
            held_out = PyTorchTensorDataset(job.clients[int(user.user_id)].held_out)
            found = model.evaluate(held_out, eval_params=context.model_eval_params)
            statistics, metrics = super().train_one_user(initial, model, user, context)
            return statistics, metrics | found

    class Timed(TrainingProcessCallback):
        ends: list[float]

        def on_train_begin(self, *, model: Any) -> Any:
            self.ends = [time.perf_counter()]
            return Metrics()

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            self.ends.append(time.perf_counter())
            return False, Metrics()

    timed, rounds, clients = Timed(), len(job.orders), len(job.clients)

    def dataset(user: str) -> Any:
        return PyTorchTensorDataset(job.clients[int(user)].ordered(job.orders[len(timed.ends) - 1][int(user)]), user)

    users = iter([str(number) for _ in range(rounds + 1) for number in range(clients)])
    train = FederatedDataset(dataset, lambda: next(users))
    network = Measured(job.weights, job.mean, job.std)
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    (Validated if validate else FederatedAveraging)().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,  # of the training images; only in the first round, which is not counted
            train_cohort_size=clients,
            val_cohort_size=None,
        ),
        SimulatedBackend(train, train, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_batch_size=job.batch, local_num_epochs=1, local_learning_rate=job.lr),
        NNEvalHyperParams(local_batch_size=256),
        [timed],
        send_metrics_to_platform=False,
    )
    final = {name: value.numpy() for name, value in network.state_dict().items()}
    return [end - begin for begin, end in zip(timed.ends, timed.ends[1:], strict=False)], final


def main(path: str, result: str, validate: str) -> None:
    """Simulate a job, and write the seconds of its rounds and the versions as JSON beside the final weights."""
    from importlib.metadata import version

    torch.set_num_threads(1)
    seconds, final = simulate(read(path), validate == "validate")
    np.savez(Path(result).with_suffix(".npz"), allow_pickle=False, **final)
    versions = {"pfl": version("pfl"), "torch": torch.__version__, "numpy": np.__version__}
    Path(result).write_text(json.dumps({"seconds": seconds, "versions": versions}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
