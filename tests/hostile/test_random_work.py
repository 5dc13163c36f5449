"""Random hostile work messages: no path, no time beyond the deadline, no crash, and how much of an image they get.

`FEDTTA_FUZZ=1000` sets the number of messages.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from fedtta.benchmarks.reconstruction import chosen_weights, decoyed_weights, gap, trap
from fedtta.client.agent import audit
from fedtta.client.agent.core import Agent
from fedtta.client.agent.federated import Relay
from fedtta.client.agent.service import Calls
from fedtta.client.policy import Policy, PolicyError
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import protobuf
from fedtta.messages.arrays import Arrays
from fedtta.messages.requests import (
    Adapt,
    AdapterRow,
    Evaluate,
    Identify,
    Masking,
    RefineRates,
    Request,
    ShareKeys,
    Summarize,
    Train,
    TrainingTask,
)
from fedtta.models.deadline import Deadline, Stopped
from fedtta.privacy import masking
from fedtta.settings import from_json, to_json
from fedtta.tta.statistics import STATISTICS
from tests.hostile.device import (
    GRACE,
    HIDDEN,
    OPEN,
    SITE,
    TOUCHED,
    agent_in,
    common,
    own_images,
    training,
)


def hostile_settings(draw: np.random.Generator, outside: Path) -> dict[str, Any]:
    """Some settings, changed to what an attacker would like or what a program may not expect."""
    choices: list[dict[str, Any]] = [
        {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {},
        {"train_part": float(draw.choice([1e-9, 0.01, 0.997]))},
        {"batch_size": int(draw.choice([1, 2, 7, 8, 358, 10**9]))},
        {"local_epochs": int(draw.choice([2, 10**9]))},
        {"personal_epochs": int(draw.choice([0, 10**6]))},
        {"learning_rate": float(draw.choice([1e-30, 1e-6, 1e6, 1e30]))},
        {"image_size": int(draw.choice([8, 16, 64, 1024]))},
        {"clients": int(draw.choice([1, 2, 50, 1000, 100_000]))},
        {"dataset": str(draw.choice(["folder", "npz", "cifar10", "pacs"])), "data_dir": str(outside)},
        {"dataset_options": f"path={outside};domain=x"},
        {"model": str(draw.choice(["os:system", "timm:resnet18", "resnet18", "torchvision:vit_b_16", "tests.x:y"]))},
        {"model_options": str(draw.choice(["width=99999", "norm=batch", "pretrained=/etc/passwd", "name=os:system"]))},
        {"methods": str(draw.choice(["em", "bbse,surgical", "all", "[", "fedavg[[["]))},
        {"eval_batch_size": int(draw.choice([1, 10**9]))},
        {"partition": str(draw.choice(["dirichlet", "step", "equal"])), "alpha": float(draw.choice([1e-9, 1e9]))},
        {"collaborations": "fedavg", "stream_size": 10**9},
        {"seed": int(draw.integers(2**31))},
        {"optimizer": "adam"}, {"augment": True, "views": "contrastive"}, {"download": True, "dataset": "cifar10"},
        {"fraction": float(draw.choice([1e-9, 0.5]))}, {"test_part": 1e-9}, {"target_fraction": 0.99},
        {"normalization": "1e-30;1e-30"}, {"state_dir": str(outside), "init": str(outside / "secret.npz")},
    ]  # fmt: skip
    found: dict[str, Any] = {"classes": SITE.classes} if draw.random() < 0.9 else {}
    for _ in range(int(draw.choice([1, 2], p=[0.8, 0.2]))):
        found |= choices[int(draw.integers(len(choices)))]
    return found


def hostile_arrays(draw: np.random.Generator, members: np.ndarray) -> Arrays:
    """Weights that single out images, or that are no weights."""
    count = int(draw.choice([0, 1, 2, 3, 100], p=[0.6, 0.1, 0.1, 0.1, 0.1]))
    arrays = trap(members, count) if count else chosen_weights()
    kind, name = int(draw.integers(18)), str(draw.choice(list(arrays)))
    if kind == 0:
        arrays[name] = arrays[name] * np.float32(draw.choice([1e30, np.nan, np.inf, 0.0, -1.0]))
    elif kind == 1:
        arrays[name] = arrays[name].astype(np.float64)
    elif kind == 2:
        arrays[name] = arrays[name][..., :1]
    elif kind == 3:
        del arrays[name]
    elif kind == 4:
        arrays = {key: draw.normal(0, 0.1, value.shape).astype(np.float32) for key, value in arrays.items()}
    elif kind > 14:
        arrays = decoyed_weights(members)
    return arrays


def hostile_request(draw: np.random.Generator, outside: Path, members: np.ndarray) -> Request:
    """A message of any phase."""
    runs = ["run1", "run2", "../x", "networks", "a" * 200, "x.forgotten", ".", "\x00", "ü"]
    about = common(str(draw.choice(runs, p=[0.9, *[0.1 / 8] * 8])), **hostile_settings(draw, outside))
    about["checkpoint_rounds"] = [int(one) for one in draw.integers(-5, 2**40, int(draw.integers(4)))]
    arrays, round = (
        hostile_arrays(draw, members),
        int(draw.choice([0, 1, 2, -1, 2**62], p=[0.03, 0.85, 0.06, 0.03, 0.03])),
    )
    names = ["t", "a/b", "..", "x" * 300, "trained-indices"]
    algorithm = str(draw.choice(["fedavg", "ditto", "fedrep", "nothing"], p=[0.85, 0.05, 0.05, 0.05]))
    loss = str(draw.choice(["cross_entropy", "balanced_softmax", "x"], p=[0.8, 0.1, 0.1]))
    task = TrainingTask(str(draw.choice(names, p=[0.92, 0.02, 0.02, 0.02, 0.02])), algorithm, loss)
    options: Any = draw.choice([{}, {"views": 10**9}, {"steps": -1}, {"lr": 1e30}, {"beta": "x"}, {"seed": 2**70}])
    adapter = str(draw.choice(["none", "memo", "fedthe", "tent", "knn_per", "em", "shot", "x"]))
    row = AdapterRow("r", adapter, options, "personalised" if draw.random() < 0.3 else "global")
    network = str(draw.choice(["ab" * 32, "../../etc/passwd", "", "x" * 300], p=[0.7, 0.1, 0.1, 0.1]))
    kind = int(draw.integers(8))
    if kind < 3:
        metrics = list(draw.choice(["global-loss", "x"], 1))
        return Train(round=round, task=task, arrays=arrays, client_metrics=metrics, proximal_mu=1.0, **about)
    if kind == 3:
        wanted = list(draw.choice([*STATISTICS, "x"], 2))
        return Summarize(round=round, task=task, arrays=arrays, wanted=wanted, **about)
    if kind == 4:
        rates = {name: np.array(1e30) for name in arrays}
        return RefineRates(round=round, variant="all", network=network, arrays=arrays, rates=rates, **about)
    if kind == 5:
        return Adapt(
            round=round,
            cell=str(draw.choice(["c", "../c"])),
            row=row,
            share="all",
            network=network,
            arrays=arrays,
            **about,
        )
    if kind == 6:
        return Identify(**about)
    shifts = list(draw.choice(["original", "corrupted", "natural", "unseen_domain", "x", "/etc/passwd"], 2))
    return Evaluate(
        round=round, task=task, arrays=arrays, rows=[row] * int(draw.integers(1, 4)), shifts=shifts, **about
    )


ANSWERS = (ValueError, FloatingPointError, Stopped)  # PolicyError and SettingsError too


def test_hostile_messages_get_no_path_no_time_and_no_crash(tmp_path: Path, outside: Path, noise: str) -> None:
    """What the updates tell is printed, not bounded: some features of any network are active for one image only.

    What bounds it are masks and noise, below.
    """
    count = int(os.environ.get("FEDTTA_FUZZ", "30"))
    draw, site = np.random.default_rng(18), {"classes": SITE.classes}
    policy = Policy(most_runs=4, most_memory_mb=1024, phases="*")
    own, divided = agent_in(tmp_path / "own", policy, data=noise), agent_in(tmp_path / "divided", policy)
    relays = {agent: Relay(agent, Calls(agent.log)) for agent in (own, divided)}
    for agent in relays:
        agent.perform(Identify(**common(**site)))
    members, others = own_images(own)
    others = others[:200]
    results: dict[str, int] = {}
    worst_gap, latest, updates, unread = 0.0, 0.0, 0, 0
    for number in range(count):
        request, seconds = hostile_request(draw, outside, members), float(draw.choice([0.2, 2.0, 20.0]))
        agent = own if draw.random() < 0.7 else divided
        data = bytearray(protobuf.to_work(request.to_record()).SerializeToString())
        if draw.random() < 0.05:  # the fields as well, not only what is in them
            data[int(draw.integers(len(data)))] = int(draw.integers(256))
        deadline, start = Deadline(seconds), time.thread_time()
        try:
            message = pb.Work.FromString(bytes(data))
            done = relays[agent]._perform(message, deadline)
            reply: Any = type(request).reply.from_record(protobuf.from_done(type(request).reply.kind, done))
        except DecodeError:
            unread += 1
            continue
        except ANSWERS as error:
            name = f"policy {error.rule}" if isinstance(error, PolicyError) else type(error).__name__
        else:
            name = f"ok {request.kind}"
            if isinstance(request, Train) and agent is own and _layout(reply.arrays) == _layout(chosen_weights()):
                worst_gap = max(worst_gap, gap(request.arrays, reply.arrays, members, others))
                updates += 1
        latest = max(latest, time.thread_time() - start - seconds)
        assert latest < GRACE, (number, request.kind, latest)
        results[name] = results.get(name, 0) + 1
    print(f"{count} messages, {updates} updates, gap {worst_gap:.3f}, {latest:.2f} s after a deadline", results)
    assert TOUCHED == []
    assert sum(1 for agent in (own, divided) for _ in audit.lines(agent.config.state_folder)) == count + 2 - unread
    for agent, relay in relays.items():
        relay.close()
        assert agent.perform(Identify(**common(**site))).role == "both"
        agent.close()


def summed(agent: Agent, request: Any, keys: list[str]) -> Any:
    """The request for a sum with honest clients of these keys: this device has dealt its shares."""
    asked = from_json(request.settings).replace(secure_aggregation=True, clients=len(keys) + 1)
    request = dataclasses.replace(request, settings=to_json(asked))
    identity: Any = agent.perform(Identify(settings=request.settings, run=request.run))
    members, session = list(range(1, len(keys) + 2)), masking.new_secret().hex()
    about: dict[str, Any] = {"session": session, "own": 1, "members": members}
    all_keys = [identity.mask_key, *keys]
    deal = ShareKeys(**about, keys=all_keys, threshold=len(members), settings=request.settings, run=request.run)
    dealt: Any = agent.perform(deal)
    told = Masking(**about, keys=[dealt.key, *keys], clients=len(members), most=1000, weighting="examples")
    return dataclasses.replace(request, masking=told)


def read_as_update(before: Arrays, words: np.ndarray) -> Arrays:
    """What is under masks, read as if there were none."""
    values, after = words.view(np.int64) / 2.0**40, {}
    for name in sorted(before):
        part, values = np.split(values, [before[name].size])
        after[name] = before[name] + part.reshape(before[name].shape)
    return after


def test_where_the_owner_wants_secure_sums_no_hostile_message_gets_an_image(tmp_path: Path, noise: str) -> None:
    """The sum itself tells images of its clients, not whose; with most of them invented it is a client's reply."""
    draw, about = np.random.default_rng(18), common(classes=SITE.classes, secure_aggregation=True, clients=4)
    agent = agent_in(tmp_path, dataclasses.replace(HIDDEN, phases="*", most_memory_mb=1024), data=noise)
    agent.perform(Identify(**about))
    members, others = own_images(agent)
    keys = [masking.public_key(masking.new_secret()).hex() for _ in range(3)]
    worst, updates, results = 0.0, 0, dict[str, int]()
    for number in range(int(os.environ.get("FEDTTA_FUZZ", "24"))):
        request: Any = hostile_request(draw, tmp_path, members)
        if number % 8 == 0:  # what is ordinary
            request = training(classes=SITE.classes)
        try:
            if isinstance(request, Train | Summarize | RefineRates) and draw.random() < 0.8:
                request = summed(agent, request, keys)
            reply: Any = agent.perform(request, Deadline(20.0))
        except ANSWERS as error:
            name = f"policy {error.rule}" if isinstance(error, PolicyError) else type(error).__name__
        else:
            name = f"ok {request.kind}"
            if isinstance(request, Train | Summarize | RefineRates | Adapt):
                left = {what for what, arrays in reply.to_record().arrays.items() if arrays}
                assert left == {"masked"}, (number, request.kind)
            if isinstance(request, Train) and _layout(request.arrays) == _layout(chosen_weights()):
                after = read_as_update(request.arrays, reply.masked["sum"])
                worst, updates = max(worst, gap(request.arrays, after, members, others[:200])), updates + 1
        results[name] = results.get(name, 0) + 1
    print(f"{updates} masked updates, gap {worst:.3f}", results)
    agent.close()
    assert updates > 3
    assert worst < 0.1


def noise_asked(draw: np.random.Generator) -> str:
    """Return noise of a hostile run: as little as the owner allows or less, under any clip."""
    z, clip = float(draw.choice([0.3, 0.29, 1e-9], p=[0.9, 0.05, 0.05])), float(draw.choice([1e-3, 0.1, 1.0, 1e6]))
    return ";".join(f"{what}={z:g}/{clip:g}" for what in ("model", "statistics", "rates"))


def test_where_the_owner_wants_noise_no_hostile_message_gets_an_image(tmp_path: Path, noise: str) -> None:
    """Of an input of n numbers a clipped update with noise z has a correlation of at most 1 / √(1 + n z²)."""
    draw, about = np.random.default_rng(18), common(classes=SITE.classes)
    policy = dataclasses.replace(OPEN, least_noise=0.3, most_epochs=10, most_memory_mb=1024)  # no rule on samples
    agent = agent_in(tmp_path, policy, data=noise)
    agent.perform(Identify(**about))
    members, others = own_images(agent)
    worst, updates, results = 0.0, 0, dict[str, int]()
    for number in range(int(os.environ.get("FEDTTA_FUZZ", "16"))):
        request: Any = hostile_request(draw, tmp_path, members)
        if number % 4 == 0:  # one image in an otherwise ordinary message
            bait = (trap, decoyed_weights)[number // 4 % 2](members)
            request = training(bait, classes=SITE.classes, batch_size=1000)
        asked = from_json(request.settings).replace(differential_privacy=noise_asked(draw))
        request = dataclasses.replace(request, settings=to_json(asked))
        try:
            reply: Any = agent.perform(request, Deadline(5.0))
        except ANSWERS as error:
            name = f"policy {error.rule}" if isinstance(error, PolicyError) else type(error).__name__
        else:
            name = f"ok {request.kind}"
            if isinstance(request, Train) and _layout(request.arrays) == _layout(chosen_weights()):
                worst = max(worst, gap(request.arrays, reply.arrays, members, others[:200]))
                updates += 1
        results[name] = results.get(name, 0) + 1
    print(f"{updates} noisy updates, gap {worst:.3f}", results)
    agent.close()
    assert updates > 3
    assert worst < 0.1


def test_an_image_among_decoys_passes_the_default_rules_and_noise_hides_it(agents: Any, noise: str) -> None:
    """What an owner without `least-noise` is told to expect: docs/deployment/policy.md."""
    plain, noisy = agents(data=noise), agents(Policy(least_noise=0.3), data=noise)
    members, others = own_images(plain)
    bait = decoyed_weights(members)
    told = plain.perform(training(bait, classes=SITE.classes, batch_size=1000))
    assert gap(bait, told.arrays, members, others[:200]) > 0.8
    request = training(bait, classes=SITE.classes, batch_size=1000, differential_privacy="model=0.3/1")
    assert gap(bait, noisy.perform(request).arrays, members, others[:200]) < 0.1


def _layout(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in arrays.items()}
