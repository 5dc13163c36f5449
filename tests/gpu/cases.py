"""What the product computes on a device: each case is a function from a device to named results on the host.

Inputs, weights and draws are the same on every device; nothing is random beside them. Networks and images have the
memory format of real runs, channels-last.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtta import tta
from fedtta.client import cohort
from fedtta.client.adapters import AdapterContext
from fedtta.client.agent.live import Live
from fedtta.client.algorithms import ALGORITHMS, LocalContext
from fedtta.client.algorithms.training import balanced_softmax
from fedtta.client.evaluation import Neighbours
from fedtta.client.served import Baseline
from fedtta.client.serving import Served, serve
from fedtta.client.state import MemoryState
from fedtta.data.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt
from fedtta.messages.requests import AdapterRow
from fedtta.models import TwoHead, build, load_model, save_model
from fedtta.models.export import export
from fedtta.tta import Adapter, Statistics
from fedtta.tta.collaborator import Collaborator
from fedtta.tta.knn_per import Datastore
from fedtta.tta.modules import zero_rates
from fedtta.tta.statistics import ON_REQUEST
from tests.client import tiny
from tests.tta import test_adapter_contract as contract

Results = dict[str, Any]
Work = Callable[[torch.device], Results]
WINDOW = {"stream_size": 12, "stream_batch": 6, "stream_concentration": 1.0, "collaborations": "none"}


# Adapters


def adapter(case: contract.Case, device: torch.device, **options: Any) -> Adapter:
    """The adapter of a case of the contract, on a device; its random views are the product's own."""
    model, store = contract.network().to(device).to(memory_format=torch.channels_last), contract.store()
    statistics = Statistics.from_arrays(contract.known().to_arrays(), device)
    rates = {name: 0.1 * (1 - 2 * (i % 2)) for i, name in enumerate(zero_rates(model))}
    neighbours = Datastore(store.features.to(device), store.labels.to(device))
    chosen = {name: value for name, value in case.options.items() if name != "augment"}
    return tta.create(case.name, model, statistics, rates, neighbours, contract.candidates(), **{**chosen, **options})


def images_on(device: torch.device, x: Tensor) -> Tensor:
    """Images [B, C, H, W] on a device, as an adapter of a run gets them."""
    return x.to(device).contiguous(memory_format=torch.channels_last)


def adapted(case: contract.Case, device: torch.device) -> Results:
    """Predictions of a stream, with a state that is saved and loaded and arrays of other clients in between."""
    one, two = adapter(case, device), adapter(case, device)
    most = 8 if case.name in ("auto", "rotta") else 4  # those two learn nothing from so few
    first, second, third = (images_on(device, part[:most]) for part in contract.stream())
    found: Results = {"first": one.predict(first), "second": one.predict(second)}
    two.load_state_dict(one.state_dict())
    if isinstance(two, Collaborator):
        two.load_shared({name: value + 0.05 for name, value in two.shared("all").items()})
    found["third"] = two.predict(third)
    found |= {f"report {name}": value for name, value in (*one.report().items(), *two.take_report().items())}
    found |= {f"state {name}": value for name, value in contract.snapshot(two).items()}
    two.reset()
    return found | {"again": two.predict(first)}


# Local training


def local_context(
    device: torch.device, model: TwoHead, own: dict[str, Tensor], count: int = 9, **changes: Any
) -> LocalContext:
    """A local algorithm's round on some images in batches of 4, augmented."""
    chosen = {"batch_size": 4, "local_epochs": 2, "classifier_epochs": 1, "augment": True, **changes}
    data = tiny.image_set(count)
    data = replace(
        data, pixels=data.pixels.to(device), labels=data.labels.to(device), counts=data.counts.to(device)
    )  # fmt: skip
    draw = torch.Generator().manual_seed(3)
    return LocalContext(model, data, balanced_softmax, tiny.settings(**chosen), draw, own, proximal_mu=0.1)


def trained(name: str, device: torch.device, **changes: Any) -> Results:
    """Two rounds of a local algorithm, the private tensors stored in between, and personalization."""
    own: dict[str, Tensor] = {}
    for seed in (1, 2):
        model = tiny.network(norm=True, seed=seed, rotation=name == "ttt").eval()
        model = model.to(device).to(memory_format=torch.channels_last)
        context = local_context(device, model, own, **changes)
        loss = ALGORITHMS[name].train(context)
        own = {key: torch.tensor(value.cpu().numpy(), device=device) for key, value in context.own.items()}
    ALGORITHMS[name].personalize(local_context(device, model, own, **changes))
    return {"loss": loss, **prefixed("own", own), **prefixed("model", model.state_dict())}


# Clients


def client(device: torch.device, partition: int = 0, model: TwoHead | None = None, **changes: Any) -> tiny.Client:
    """A client of three whose network is on a device."""
    network = tiny.network(norm=True) if model is None else model
    chosen = {"augment": True, "views": "crop_flip", "batch_size": 8, "personal_epochs": 1, **changes}
    network = network.to(device).to(memory_format=torch.channels_last)
    made = tiny.device(partition, world=tiny.federation(48), model=network, **chosen)
    return tiny.Client(replace(made.inner, device=device))


def rounds(device: torch.device) -> Results:
    """Training, statistics and the evaluation of one client: every part of what a run asks of it."""
    one, task = client(device), tiny.Task("t", objective="balanced_softmax")
    start = tiny.global_arrays(tiny.network(norm=True, seed=1))
    arrays, metrics = one.train(1, task, start, proximal_mu=0.1, client_metrics=["global-loss"])
    means, summary = one.statistics(2, task, arrays, ON_REQUEST)
    rows = [AdapterRow(name, name) for name in ("none", "personal", "fedthe", "btfl", "knn_per", "em", "bbse")]
    rows += [AdapterRow("tuned", "tent", {"lr": 0.05}, "personalised"), AdapterRow("bn", "bn_adapt")]
    leak, results = one.evaluate(2, task, arrays, means, rows, ["original", "mixture"])
    found = {f"{row['method']} {row['shift']} {key}": value for row in results for key, value in row.items()}
    numbers = {name: value for name, value in found.items() if not (isinstance(value, str) or "seconds" in name)}
    kept = {**prefixed("array", arrays), **prefixed("mean", means), **prefixed("leak", leak)}
    return {**kept, **prefixed("metric", metrics), **prefixed("summary", summary), **numbers}


def kept(device: torch.device) -> Results:
    """Two rounds of a local algorithm whose tensors stay on the client, and the network that it tests."""
    one, task, arrays = client(device), tiny.Task("t", "ditto"), tiny.global_arrays(tiny.network(norm=True, seed=1))
    for number in (1, 2):
        arrays, metrics = one.train(number, task, arrays)
    row = AdapterRow("own", "none", {}, "personalised")
    _, results = one.evaluate(2, task, arrays, None, [row], ["original"])
    found = {**prefixed("array", arrays), **prefixed("metric", metrics), "correct": results[0]["correct"]}
    return {**found, **prefixed("state", one.state.load("t", 2))}


def batchnorm() -> TwoHead:
    return build("resnet20-bn", tiny.CLASSES, image_size=tiny.SIZE, seed=3, depth=8, width=4)


def collaborated(name: str, device: torch.device) -> Results:
    """Two test-time rounds of a client whose arrays are mixed with others' in between."""
    one, row = client(device, model=batchnorm(), **WINDOW), AdapterRow(name, name, {"lr": 0.01})
    arrays = tiny.global_arrays(batchnorm())
    first = one.adapt(1, "cell", arrays, row, shared=None, proximal_mu=0.1)
    mixed = {key: value * value.dtype.type(1.01) for key, value in first.shared.items()}
    second = one.adapt(2, "cell", arrays, row, shared=mixed, proximal_mu=0.1)
    found = {"correct": first.correct + second.correct, **prefixed("shared", second.shared)}
    return {**found, **prefixed("domain", second.normalization), **prefixed("start", second.start)}


def refined(device: torch.device) -> Results:
    """Rates of adaptation after an epoch of validation batches."""
    one = client(device, model=batchnorm(), rates_epochs=1, rates_batch_size=5)
    rates, metrics = one.refine_rates(1, tiny.global_arrays(batchnorm()), {}, "all")
    return {**prefixed("rate", rates), **prefixed("metric", metrics)}


def vectorised(device: torch.device, same: bool = True) -> Results:
    """A round of three clients of different sizes at once; if not all are `same`, each keeps its BatchNorm (FedBN)."""
    model = tiny.network(norm=True).to(device).to(memory_format=torch.channels_last)
    splits = tiny.federation_of_splits(tiny.images(31), (9, 3, 2), (5, 2, 2), (4, 2, 2))
    settings = {"augment": True, "personal_epochs": 1}
    members = [tiny.device(i, MemoryState(), splits, model, **settings) for i in range(3)]
    members = [tiny.Client(replace(one.inner, device=device)) for one in members]
    arrays = tiny.global_arrays(tiny.network(norm=True))
    task = tiny.Task("t", aggregated=None if same else [name for name in arrays if ".norm." not in name])
    requests = [one.request(1, task, arrays, proximal_mu=0.1) for one in members]
    replies = cohort.train([one.inner for one in members], requests)
    found: Results = {}
    for number, reply in enumerate(replies):
        if isinstance(reply, Exception):
            raise reply
        found |= prefixed(f"{number}", reply.arrays) | prefixed(f"{number} metric", reply.to_record().values)
        found |= prefixed(f"{number} state", members[number].state.load("t", 1))
    return found


# Data


def corrupted(device: torch.device) -> Results:
    """Every corruption of two images."""
    x = torch.tensor(tiny.images(2).pixels, device=device) / 255
    return {name: corrupt(x, name, 3, 1) for name in (*CORRUPTIONS, *EXTRA_CORRUPTIONS)}


# The agent, and files


def served(device: torch.device, name: str, options: Mapping[str, Any] | None = None) -> Served:
    """A served model on a device, with all that an adapter may need."""
    spec = {"name": "cnn", "num_classes": tiny.CLASSES, "image_size": tiny.SIZE, "norm": "batch"}
    model = build(**spec, seed=1).to(device).to(memory_format=torch.channels_last)
    draw = torch.Generator().manual_seed(4)
    vectors = {key: torch.rand(model.feature_dim, generator=draw, dtype=torch.float64).numpy() for key in VECTORS}
    statistics = Statistics.from_arrays(
        {**vectors, "entropy_local": np.array(0.9), "entropy_global": np.array(0.8)}, device
    )
    x = torch.rand(12, 3, tiny.SIZE, tiny.SIZE, generator=draw)
    with torch.no_grad():
        store = Datastore(model.eval().features(x.to(device)), (torch.arange(12) % tiny.CLASSES).to(device))
    row, classes = AdapterRow(name, name, dict(options or {})), tuple(f"class{k}" for k in range(tiny.CLASSES))
    nothing = Neighbours(store, x.to(device), (torch.arange(12) % tiny.CLASSES).to(device))
    baseline, rates = Baseline.unknown(tiny.CLASSES), {"all": dict.fromkeys(zero_rates(model), 0.01)}
    context = AdapterContext(model, tiny.settings(), statistics, rates, nothing)
    return serve(row, context, None, spec, classes, baseline)


VECTORS = ("descriptor_local", "descriptor_global", "dle_local", "dle_global")


def answered(name: str, device: torch.device) -> Results:
    """An agent's answers to requests of several and of one image, and after its state went through a snapshot."""
    live, other = (Live(served(device, name), None, print) for _ in range(2))
    pixels = tiny.images(9).pixels.astype(np.float32) / 255
    found: Results = {}
    for number, part in enumerate(np.split(pixels, [6, 7])):
        found[f"{number} probabilities"], weights, _ = live.predict(part)
        found[f"{number} weights"] = 0.0 if weights is None else weights
    other.load(live.state(), live.samples)
    found["after loading"] = other.predict(pixels[:2])[0]
    return {**found, **prefixed("state", other.state())}


def stored(device: torch.device) -> Results:
    """A model that goes through the files of a run and of an agent, and an exported one."""
    x = torch.tensor(tiny.images(3).pixels) / 255
    with tempfile.TemporaryDirectory() as name:
        folder, one = Path(name), served(device, "knn_per")
        save_model(folder / "model.safetensors", one.network, one.spec, personal=True)
        model, _ = load_model(folder / "model.safetensors")
        one.save(folder)
        two = Served.load(folder, device)
        program = torch.export.load(export(folder / "model.safetensors", folder / "model.pt2", "torch-export"))
        exported = program.module()(x)
        same = float(one.digest() == two.digest())
        return {"model": model.to(device)(x.to(device)), "served": two.build().predict(x.to(device)),
                "exported": exported, "same digest": same}  # fmt: skip


def prefixed(prefix: str, values: Mapping[str, Any] | None) -> Results:
    """Values by "<prefix> <name>", without times."""
    return {f"{prefix} {name}": value for name, value in (values or {}).items() if "seconds" not in name}


CASES: dict[str, Work] = {
    **{f"adapter {case}": partial(adapted, case) for case in contract.CASES},
    **{f"training {name}": partial(trained, name) for name in ALGORITHMS},
    "training adam": partial(trained, "fedavg", optimizer="adam", learning_rate=1e-3, weight_decay=0.01),
    "client rounds": rounds,
    "client keeping": kept,
    **{f"collaborative {name}": partial(collaborated, name) for name in ("tent", "bbn")},
    "refined rates": refined,
    "vectorised training": vectorised,
    "vectorised training of networks that differ": partial(vectorised, same=False),
    "corruptions": corrupted,
    **{f"agent {name}": partial(answered, name) for name in ("btfl", "fedthe", "tent", "none", "knn_per")},
    "files": stored,
}
