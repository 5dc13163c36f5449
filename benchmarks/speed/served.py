"""A model to serve that needs no training, and an agent that starts with it.

The papers' CNN with random features; its heads are fitted by least squares on a thousand samples of the embedded
digits, accurate enough for the agent's guard to accept the stream.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtta.client.adapters import AdapterContext
from fedtta.client.agent.store import Store
from fedtta.client.resources import federation_of, network_spec
from fedtta.client.serving import Served, baseline_predictions, serve
from fedtta.data import Federation
from fedtta.messages.requests import AdapterRow
from fedtta.models import TwoHead, build
from fedtta.settings import Settings
from fedtta.simulation import deployment as nodes
from fedtta.simulation.superlink import FlowerError
from fedtta.tta import Statistics
from fedtta.tta.statistics import discretise

#: One client of some; the network takes 32x32x3 and has 10 classes.
SETTINGS = Settings(dataset="digits", image_size=32, clients=4, model="cnn", device="cpu")
PARTITION = 0
CPU = torch.device("cpu")
RIDGE = 1e-2  # of the features' mean square
SHARPNESS = 12.0  # times the fitted 0 and 1, so that logits spread as a trained head's do
STOPPING = 60.0  # seconds that an agent may take to save and end


def sample_images(count: int) -> NDArray[np.uint8]:
    """Return test images of all clients, repeated up to uint8 [count, 3, 32, 32]."""
    return federation_of(SETTINGS).images.pixels[_samples(count)]


def sample_labels(count: int) -> NDArray[np.int64]:
    """Return the labels [count] of `sample_images`."""
    return federation_of(SETTINGS).images.labels[_samples(count)]


def _samples(count: int) -> NDArray[np.int64]:
    test = np.concatenate([split.test for split in federation_of(SETTINGS).splits])
    order = np.random.default_rng(0).permutation(test)
    return order[np.arange(count) % len(order)]


@torch.no_grad()
def fabricate() -> Served:
    """Return a served model with all statistics that FedTHE and BTFL need."""
    federation = federation_of(SETTINGS)
    spec = network_spec(federation.images, SETTINGS)
    network = build(**spec, seed=0).eval().to(memory_format=torch.channels_last)
    statistics = fit(network, federation)
    ordinary = baseline_predictions(network, federation, PARTITION, CPU, SETTINGS.eval_batch_size, labelled=True)
    context = AdapterContext(network, SETTINGS, statistics)
    return serve(AdapterRow("none", "none"), context, None, spec, federation.images.classes, ordinary)


def fit(network: TwoHead, federation: Federation) -> Statistics:
    """Fit the global head to all training samples, the personal one to the client's; return the statistics."""
    images = federation.images
    indices = [split.train for split in federation.splits]
    features = [network.features(images.batch(index, CPU)).double() for index in indices]
    labels = [torch.from_numpy(images.labels[index]) for index in indices]
    ones = torch.ones(sum(map(len, indices)), 1, dtype=torch.float64)
    weight = _least_squares(torch.cat([torch.cat(features), ones], 1), torch.cat(labels), len(images.classes))
    network.head.weight.copy_(weight[:, :-1])
    network.head.bias.copy_(weight[:, -1])
    mine = features[PARTITION]
    network.personal_head.weight.copy_(_least_squares(mine, labels[PARTITION], len(images.classes)))
    zeros = [(discretise(z) == 0).double().mean(0) for z in features]
    return Statistics(
        descriptor_local=mine.mean(0),
        descriptor_global=torch.stack([z.mean(0) for z in features]).mean(0),
        dle_local=zeros[PARTITION],
        dle_global=torch.stack(zeros).mean(0),
        entropy_local=_mean_entropy(network.personal_head(mine.float())),
        entropy_global=_mean_entropy(network.head(mine.float())),
    )


def _least_squares(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return W [K, d] with W z close to `SHARPNESS` times the one-hot label."""
    wanted = SHARPNESS * torch.nn.functional.one_hot(labels, classes).double()
    square = features.T @ features
    ridge = RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=square.dtype)
    return torch.linalg.solve(square + ridge, features.T @ wanted).T


def _mean_entropy(logits: Tensor) -> float:
    logs = logits.double().log_softmax(1)
    return float(-(logs.exp() * logs).sum(1).mean())


@contextmanager
def running(
    folder: Path, served: Served, keys: Mapping[str, Any], prepare: Callable[[Path], None] | None = None
) -> Iterator[tuple[str, int]]:
    """Run an agent (`python -m fedtta.client.agent`) that has a model; yield its address and process id.

    Parameters
    ----------
    folder : Path
        Absolute and short, for the sockets are in it, too; made here.
    keys : mapping
        Of the agent's config, besides those that place it.
    prepare : callable, optional
        Called with the folder of the stored model before the agent starts.

    Raises
    ------
    FlowerError
        It does not start or stop as it should; the message has the end of its log.
    """
    folder.mkdir()
    config = nodes.agent_config(folder, folder, str(PARTITION), {"device": SETTINGS.device, **keys})
    store = Store(folder / f"agent-{PARTITION}", 1, print)
    model = store.add(served, "served")
    store.close()
    if prepare is not None:
        prepare(folder / f"agent-{PARTITION}" / "models" / model.name)
    address = f"unix:{folder}/a{PARTITION}"
    process = nodes.start_agent(folder / "home", config)
    try:
        try:
            nodes.wait_for_agents({address: process})
            yield address, process.pid
            process.terminate()
            status = process.wait(STOPPING)
        finally:
            process.kill()
            process.wait()
        if status:
            raise FlowerError(f"the agent ended with status {status}")
    except (FlowerError, subprocess.TimeoutExpired) as error:
        raise FlowerError(f"{error}\n{nodes.logs(folder, f'*/{nodes.AGENT_LOG}')}") from error
