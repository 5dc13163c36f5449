"""A hostile server: work messages that ask for images, labels, paths, time, memory and the served model.

`FEDTTA_FUZZ=1000` sets the number of messages of the fuzzer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError

from fedtta.client.agent import audit
from fedtta.client.agent.config import AgentConfig
from fedtta.client.agent.core import Agent
from fedtta.client.agent.policy import Policy, PolicyError, statistics_of
from fedtta.client.agent.server import serve
from fedtta.client.agent.service import Calls, Relay
from fedtta.client.node import make_device
from fedtta.client.resources import federation_of
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc, protobuf
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
    Unmask,
)
from fedtta.models import build
from fedtta.models.deadline import Deadline, Stopped
from fedtta.privacy import masking
from fedtta.server.methods import METHODS
from fedtta.settings import Settings, from_json, to_json
from fedtta.tta.registry import info
from fedtta.tta.statistics import STATISTICS
from tests.client.agent import fake, world
from tests.hostile.reconstruction import SIZE, chosen_weights, correlations, gap, reconstructed, responses

#: A run of the digits whose weights the server has chosen, one step for all samples.
RUN = Settings(
    clients=3,
    partition="iid",
    image_size=SIZE,
    normalization="half",
    augment=False,
    local_epochs=1,
    batch_size=512,
    personal_epochs=0,
    learning_rate=0.1,
    weight_decay=0.0,
    device="cpu",
)
TASK = TrainingTask("t")
#: A device whose owner allows what was allowed before there was a policy.
OPEN = Policy(
    count_step=1, least_batch_size=1, least_samples=1, least_effective_samples=1.0, least_active_share=0.0,
    least_train_part=0.0, most_epochs=10**9, phases="*", statistics="*",
)  # fmt: skip
GRACE = 2.0  # seconds of computation after its deadline in which work has to end, however busy the machine is


def agent_in(folder: Path, policy: Policy | None = None, **keys: Any) -> Agent:
    given = {"name": "0", "state_dir": str(folder / "state"), "device": "cpu", "save_every_seconds": 1e6, **keys}
    return Agent(AgentConfig(**given, policy=policy or Policy()))


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def make(policy: Policy | None = None, **keys: Any) -> Agent:
        made.append(agent_in(tmp_path / str(len(made)), policy, **keys))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """A device with the default policy, for messages that change nothing."""
    agent = agent_in(tmp_path_factory.mktemp("shared"))
    yield agent
    agent.close()


def common(run: str = "run1", **changes: Any) -> dict[str, Any]:
    return {"settings": to_json(RUN.replace(**changes)), "run": run}


def training(arrays: Arrays | None = None, run: str = "run1", **changes: Any) -> Train:
    return Train(round=1, task=TASK, arrays=arrays or chosen_weights(), **common(run, **changes))


def summary(wanted: list[str], **changes: Any) -> Summarize:
    return Summarize(round=1, task=TASK, arrays=chosen_weights(), wanted=wanted, **common(**changes))


def evaluation(*rows: AdapterRow, arrays: Arrays | None = None, **changes: Any) -> Evaluate:
    given = {"rows": list(rows) or [AdapterRow("plain", "none")], "shifts": ["original"]}
    return Evaluate(round=1, task=TASK, arrays=arrays or chosen_weights(), **given, **common(**changes))


def last(agent: Agent) -> dict[str, Any]:
    """The last line of the audit log."""
    return list(audit.lines(agent.config.state_folder))[-1]


def digits() -> np.ndarray:
    """The images that client 0 of the digits trains on."""
    federation = federation_of(RUN)
    return federation.images.pixels[federation.splits[0].train]


SITE = RUN.replace(classes=",".join(map(str, range(10))))


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Data of a device's own: images of noise, of which none is like another."""
    rng, path = np.random.default_rng(1), tmp_path_factory.mktemp("noise") / "data.npz"
    images = rng.integers(0, 256, (1000, 1, SIZE, SIZE), np.uint8)
    np.savez(path, x=images, y=np.arange(1000) % 10)
    return f"npz:{path}"


def own_images(agent: Agent) -> tuple[np.ndarray, np.ndarray]:
    """The images of its own that a device trains on, and all others."""
    device = make_device(Identify(settings=to_json(SITE), run="run1"), agent._node)
    split, images = device.federation.splits[0], device.federation.images
    return images.pixels[split.train], images.pixels[np.concatenate([split.validation, split.test])]


def trap(seen: np.ndarray, count: int = 1) -> Arrays:
    """Weights under which so many of the images have a feature."""
    found = np.sort(responses(seen))
    return chosen_weights(float(found[-count] + found[-count - 1]) / 2)


# What a message may ask for


ADAPTATION = Adapt(round=1, cell="c", row=AdapterRow("r", "bbn"), share="all", network="n", **common())
BEYOND: dict[str, tuple[str, Request]] = {
    "one training sample": ("least-train-part", training(train_part=1e-9)),
    "all samples but one": ("least-train-part", training(train_part=0.997)),
    "a batch of one": ("least-batch-size", training(batch_size=1)),
    "a client with few samples": ("least-samples", training(clients=150)),
    "a run of one client": ("least-clients", training(clients=1)),
    "work without end": ("most-epochs", training(local_epochs=10**9)),
    "personal work without end": ("most-epochs", training(personal_epochs=10**9)),
    "images of 1024 pixels": ("most-image-size", training(image_size=1024)),
    "a batch of a million": ("most-memory-mb", evaluation(eval_batch_size=10**6)),
    "a training batch of a million": ("most-memory-mb", training(batch_size=10**6)),
    "a network of 4 GB": ("most-memory-mb", training(model="timm:vit_giant_patch14_224", image_size=224)),
    "views without number": ("adapters", evaluation(AdapterRow("r", "memo", {"views": 10**9}))),
    "views that fill the memory": ("most-memory-mb", evaluation(AdapterRow("r", "memo", {"views": 256, "steps": 256}))),
    "a function as a network": ("models", training(model="os:getcwd")),
    "a function by an option": ("models", training(model_options="name=os:getcwd")),
    "a file by an option": ("models", training(model="timm:resnet18", model_options="checkpoint_path=/etc/passwd")),
    "a folder as a data set": ("datasets", training(dataset="folder", dataset_options="path=/etc;domain=x")),
    "an npz as a data set": ("datasets", training(dataset="npz", dataset_options="path=/etc/passwd")),
    "options of the data set": ("dataset-options", training(dataset_options="path=/etc")),
    "the label prior, needed by no row": ("statistics", summary(["label_prior"])),
    "the label prior for a row": ("statistics", summary(["label_prior"], methods="em")),
    "the confusion matrix for a row": ("statistics", summary(["confusion"], methods="fedavg,bbse[predictions=soft]")),
    "a run that needs label counts": ("statistics", Identify(**common(methods="em"))),
    "a test-time round": ("phases", ADAPTATION),
    "a run of test-time rounds": ("phases", Identify(**common(collaborations="fedavg"))),
    "another folder of state": ("names", training(run="../other")),
    "the folder of networks": ("names", training(run="networks")),
    "a run that counts as forgotten": ("names", training(run="a.forgotten")),
    "weights that single out one image": ("least-effective-samples", training()),
    "a training with the name of a path": ("names", dataclasses.replace(training(), task=TrainingTask("../t"))),
    "settings of two megabytes": ("most-message-mb", dataclasses.replace(training(), settings=" " * (2 << 20))),
}  # fmt: skip


@pytest.mark.parametrize("case", BEYOND)
def test_a_message_beyond_a_rule_is_refused_by_its_name(shared: Agent, case: str) -> None:
    rule, request = BEYOND[case]
    if rule == "least-effective-samples":
        request = training(trap(digits()))
    with pytest.raises(PolicyError, match=f"^policy {rule}: ") as caught:
        shared.perform(request)
    assert caught.value.rule == rule
    line = last(shared)
    assert (line["result"], line["reason"], "sent" in line) == (f"policy {rule}", str(caught.value)[:500], False)
    assert not list((shared.config.state_folder / "private").rglob("*@*"))


#: A device whose owner has models, statistics and rates leave in secure sums of at least four clients only.
HIDDEN = Policy(secure_aggregation=True, least_clients=4)


def masked(request: Any, members: int = 4, keys: int | None = None) -> Any:
    """The request for a secure sum; its keys are invented."""
    public = [f"{one:064x}" for one in range(2, 2 + (members if keys is None else keys))]
    return dataclasses.replace(
        request, masking=Masking("s", 1, list(range(1, members + 1)), public, members, 1000, "uniform")
    )


SECURE: dict[str, Any] = {"clients": 4, "secure_aggregation": True}
DEALT: dict[str, Any] = {"session": "s", "own": 1, "threshold": 2, **common(**SECURE)}
RATES = RefineRates(round=1, variant="all", network="ab" * 32, **common(**SECURE))
UNHIDDEN: dict[str, tuple[str, Request]] = {
    "a run without": ("secure-aggregation", Identify(**common(clients=4))),
    "a training without masks": ("secure-aggregation", training(**SECURE)),
    "statistics without masks": ("secure-aggregation", summary([], **SECURE)),
    "rates without masks": ("secure-aggregation", RATES),
    "masks in a run that has none": ("secure-aggregation", masked(training(clients=4))),
    "a sum with one other": ("least-clients", masked(training(**SECURE), 2)),
    "a sum with itself, named four times": (
        "least-clients",
        dataclasses.replace(training(**SECURE), masking=Masking("s", 1, [1] * 4, ["02"] * 4, 4, 9, "uniform")),
    ),
    "rates with two others": ("least-clients", masked(RATES, 3)),
    "shares for two others": ("least-clients", ShareKeys(members=[1, 2, 3], keys=["02", "03", "04"], **DEALT)),
    "the sum of three survivors": (
        "least-clients", Unmask(session="s", survivors=[1, 2, 3], shares=["00"] * 4, **common(**SECURE))
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNHIDDEN)
def test_where_the_owner_wants_secure_sums_nothing_else_is_sent(agents: Any, case: str) -> None:
    rule, request = UNHIDDEN[case]
    agent = agents(HIDDEN)
    with pytest.raises(PolicyError, match=f"^policy {rule}: "):
        agent.perform(request)
    assert "sent" not in last(agent)


def test_a_secure_sum_of_itself_is_refused_by_default(shared: Agent) -> None:
    with pytest.raises(PolicyError, match=r"^policy least-clients: a secure sum of 1; allowed is 2 or more$"):
        shared.perform(masked(training(**SECURE), 1))


def test_less_noise_than_the_owner_wants_is_refused() -> None:
    policy = Policy(least_noise=0.5)
    for how in ("", "statistics=9/1", "model=0.4/1"):
        with pytest.raises(PolicyError, match=r"^policy least-noise: z = 0(\.4)? on model; allowed is 0\.5 or more$"):
            policy.check_request(training(), RUN.replace(differential_privacy=how), own_data=False)
    noisy = RUN.replace(differential_privacy="model=0.5/1")
    policy.check_request(training(), noisy, own_data=False)
    policy.check_request(Identify(**common()), RUN, own_data=False)
    with pytest.raises(PolicyError, match=r"^policy least-noise: z = 0 on statistics"):
        policy.check_request(summary([]), noisy, own_data=False)


def test_statistics_on_request_belong_to_methods_of_their_adapters_names() -> None:
    for name, method in METHODS.items():
        wanted = {one for one, it in STATISTICS.items() if it.on_request and it.need in info(method.adapter).needs}
        assert statistics_of(f"fedavg, {name}[training=a[b=c],d]") == wanted, name
    assert statistics_of("all") == {"label_prior", "confusion", "block_scores"}


def test_a_list_of_names_has_everything_or_what_it_names(agents: Any) -> None:
    agent = agents(Policy(algorithms="fedavg", adapters="none,tent", statistics="label_prior", phases="*"))
    with pytest.raises(PolicyError, match=r"^policy algorithms: ditto; allowed is fedavg$"):
        agent.perform(dataclasses.replace(training(), task=TrainingTask("t", "ditto")))
    with pytest.raises(PolicyError, match=r"^policy adapters: memo; allowed is none,tent$"):
        agent.perform(evaluation(AdapterRow("r", "memo")))
    with pytest.raises(PolicyError, match=r"^policy statistics: confusion; allowed is label_prior$"):
        agent.perform(summary(["confusion"], methods="bbse"))
    assert "label_prior" in agent.perform(summary(["label_prior"], methods="em")).statistics


# Images and labels


def alone_image() -> np.ndarray:
    federation = federation_of(RUN.replace(train_part=1e-9))
    return federation.images.pixels[federation.splits[0].train]


def test_the_gradient_of_one_image_is_that_image_and_no_policy_means_it_is_told(agents: Any) -> None:
    """The attack works: this is what a device told before it had a policy."""
    weights = chosen_weights()
    alone = training(weights, train_part=1e-9, batch_size=1)
    reply = agents(OPEN).perform(alone)
    assert correlations(reconstructed(weights, reply.arrays), alone_image()).max() > 0.99
    with pytest.raises(PolicyError, match=r"^policy least-train-part: train-part = 1e-09; allowed is 1 or more$"):
        agents().perform(alone)


def test_an_update_that_is_allowed_tells_no_single_image(shared: Agent) -> None:
    weights, federation = chosen_weights(), federation_of(RUN)
    members = federation.splits[0].train
    others = np.setdiff1d(np.arange(len(federation.images)), members)
    inside, outside = (federation.images.pixels[index] for index in (members, others))
    for batch in (len(members) - 1, len(members)):  # without the rules, the last batch of the first is one image
        reply = shared.perform(training(weights, batch_size=batch, run="told"))
        image = reconstructed(weights, reply.arrays)
        assert correlations(image, inside).max() < correlations(image, outside).max() + 0.1


def test_weights_that_single_out_images_are_refused(agents: Any, noise: str) -> None:
    agent, site = agents(data=noise), {"classes": SITE.classes}
    members, others = own_images(agent)
    for count, rule in ((1, "least-effective-samples"), (16, "least-active-share")):
        bait = trap(members, count)
        with pytest.raises(PolicyError, match=f"^policy {rule}: "):
            agent.perform(training(bait, **site))
        with pytest.raises(PolicyError, match=r"^policy least-active-share: "):
            agent.perform(dataclasses.replace(summary([], **site), arrays=bait))
    bait = trap(members)
    reply = agents(OPEN, data=noise).perform(training(bait, **site))
    assert gap(bait, reply.arrays, members, others) > 0.8  # the attack works
    reply = agent.perform(training(**site))
    assert gap(chosen_weights(), reply.arrays, members, others) < 0.2


def test_ten_constant_models_do_not_tell_the_counts_of_the_classes(agents: Any) -> None:
    federation = federation_of(world.SETTINGS)
    split, labels = federation.splits[0], federation.images.labels
    test, held = (np.bincount(labels[part], minlength=10) for part in (split.test, split.validation))
    weights = dict(world.initial())

    def asked(policy: Policy) -> list[int]:
        agent, found = agents(policy), []
        for one in range(10):
            weights["head.bias"] = (1000 * (np.arange(10) == one)).astype(np.float32)
            found.append(agent.perform(world.evaluation(weights, None)).results[0].correct)
        step = Train(
            round=1, task=TASK, arrays=weights, run="r", settings=to_json(world.SETTINGS.replace(local_epochs=1))
        )
        return [*found, agent.perform(step).validation_correct]

    assert asked(OPEN) == [*test.tolist(), held[9]]  # the attack works
    told = asked(Policy())
    assert told[:10] == [5 * int(count / 5 + 0.5) for count in test.tolist()]
    assert told[10] % 5 == 0


def test_messages_and_evaluations_are_counted_over_restarts(tmp_path: Path) -> None:
    policy = Policy(messages_per_hour=3, evaluations_per_day=1)
    agent = agent_in(tmp_path, policy)
    agent.perform(Identify(**common()))
    agent.perform(evaluation())
    agent.close()
    agent = agent_in(tmp_path, policy)
    with pytest.raises(PolicyError, match=r"^policy evaluations-per-day: 1 in 24 hours; allowed is 1$"):
        agent.perform(evaluation())
    agent.perform(Identify(**common()))  # what was refused does not count
    with pytest.raises(PolicyError, match=r"^policy messages-per-hour: 3 in the last hour; allowed is 3$"):
        agent.perform(Identify(**common()))
    agent.close()


# Paths


TOUCHED: list[str] = []
WATCHED: list[str] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if (
        WATCHED
        and event in ("open", "os.listdir", "os.scandir")
        and isinstance(arguments[0], str | bytes | os.PathLike)
    ):
        path = str(Path(os.fsdecode(arguments[0])).absolute())
        TOUCHED.extend(path for outside in WATCHED if path.startswith(outside))


sys.addaudithook(_watch)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder of images and files that no message may touch."""
    folder = tmp_path / "outside"
    (folder / "a").mkdir(parents=True)
    (folder / "secret.npz").write_bytes(b"secret")
    WATCHED[:], TOUCHED[:] = [str(folder), "/etc/"], []
    yield folder
    WATCHED.clear()


def test_paths_in_a_message_are_not_looked_at(agents: Any, outside: Path) -> None:
    agent = agents()
    secret = str(outside / "secret.npz")
    paths = {"data_dir": str(outside), "init": secret, "rates_init": secret, "devices": secret, "results": str(outside)}
    assert agent.perform(Identify(**common(**paths, state_dir=str(outside), resume=str(outside)))).name == "0"
    for dataset, options in (("folder", "path=a"), ("npz", "path=secret.npz"), ("digits", f"path={outside}")):
        with pytest.raises(PolicyError):
            agent.perform(Identify(**common(**paths, dataset=dataset, dataset_options=options)))
    assert TOUCHED == []
    assert not list(outside.glob("**/*@*"))


# Time


@pytest.fixture
def socket() -> Iterator[tuple[Agent, agent_pb2_grpc.RelayStub]]:
    """A device whose owner bounds no epochs, behind its socket."""
    with fake.folder() as folder:
        agent = agent_in(folder, dataclasses.replace(OPEN, most_seconds=60.0))
        agent.perform(Identify(**common()))  # what is imported and loaded once takes no part in the times below
        running = serve(agent, agent.config)
        with fake.channel(running.relay) as line:
            yield agent, agent_pb2_grpc.RelayStub(line)
        running.stop(10.0)
        agent.close()


def endless(run: str = "run1") -> Any:
    return protobuf.to_work(training(run=run, local_epochs=10**9, batch_size=32).to_record())


def idle(agent: Agent) -> bool:
    return agent.status().training == ""


def waited(true: Callable[[], bool]) -> float:
    """Wait until it is true, and return the seconds for which this process has computed meanwhile."""
    start = time.process_time()
    fake.until(true)
    return time.process_time() - start


def test_work_ends_with_its_deadline_and_the_next_work_begins(socket: Any) -> None:
    agent, stub = socket
    with pytest.raises(grpc.RpcError) as caught:
        stub.Perform(endless(), timeout=1.0)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert waited(lambda: idle(agent)) < GRACE
    stub.Perform(protobuf.to_work(Identify(**common()).to_record()), timeout=30)
    assert [line["result"] for line in audit.lines(agent.config.state_folder)] == ["ok", "Stopped", "ok"]


def test_work_ends_when_its_caller_disappears(socket: Any) -> None:
    agent, stub = socket
    call = stub.Perform.future(endless(), timeout=600)
    waited(lambda: agent.status().training == "train")
    call.cancel()
    assert waited(lambda: idle(agent)) < GRACE
    line = last(agent)
    assert (line["result"], line["reason"]) == ("Stopped", "stopped: its caller is gone")


def test_work_ends_after_the_seconds_of_the_owner(agents: Any) -> None:
    agent = agents(dataclasses.replace(OPEN, most_seconds=1.0))
    with pytest.raises(PolicyError, match=r"^policy most-seconds: stopped: not done within 1 s; allowed is 1$"):
        agent.perform(training(local_epochs=10**9, batch_size=32))
    assert not list((agent.config.state_folder / "private").rglob("*@*"))  # it leaves no trace


@pytest.mark.parametrize("row", [AdapterRow("r", "memo"), AdapterRow("r", "surgical", {"block": 0, "steps": 200})])
def test_an_evaluation_stops_too(agents: Any, row: AdapterRow) -> None:
    agent, deadline = agents(OPEN), Deadline(600)
    agent.perform(evaluation())
    request = evaluation(*[row] * 2000)
    threading.Timer(0.3, lambda: deadline.cancel("its caller is gone")).start()
    start = time.thread_time()
    with pytest.raises(Stopped, match="its caller is gone"):
        agent.perform(request, deadline)
    assert time.thread_time() - start < 0.3 + GRACE


# State and models


def test_throw_away_runs_do_not_remove_the_state_of_a_run(agents: Any) -> None:
    agent = agents(Policy(most_runs=5), runs_kept=2)
    agent.perform(training(run="honest"))
    for i in range(4):
        agent.perform(training(run=f"throw-away-{i}"))
    with pytest.raises(PolicyError, match=r"^policy most-runs: private state of 5 runs is kept; allowed is 5$"):
        agent.perform(training(run="throw-away-6"))
    assert agent.perform(Identify(**common("honest"))).saved == {"t": [1]}
    week = time.time() - 8 * 86400
    os.utime(agent.config.state_folder / "private" / "throw-away-1" / "0", (week, week))
    agent.perform(Identify(**common("honest")))
    agent.perform(training(run="throw-away-6"))  # the old one has made room


def test_state_beyond_its_size_is_refused(agents: Any) -> None:
    agent = agents(Policy(most_state_mb=1))
    agent.perform(training())
    (agent.config.state_folder / "private" / "run1" / "0" / "t@0.safetensors").write_bytes(bytes(2 << 20))
    with pytest.raises(PolicyError, match=r"^policy most-state-mb: 2 MiB; allowed is 1$"):
        agent.perform(training())


def untrained(image_size: int = 16, sharp: float = 50.0, seed: int = 9) -> Arrays:
    network = build("cnn", 10, image_size=image_size, norm="batch", seed=seed)
    arrays = {name: value.numpy().copy() for name, value in network.global_state().items()}
    return {**arrays, "head.weight": arrays["head.weight"] * np.float32(sharp)}  # as sure of itself as a trained one


def test_an_untrained_run_does_not_replace_a_good_model(agents: Any) -> None:
    agent = agents(adapter="none")
    trained, _ = world.train(agent.perform)
    before, shots = agent.status().version, agent.status().snapshots
    assert before.startswith("run1/")
    reply = agent.perform(world.evaluation(untrained(), None, run="hostile"))
    assert reply.served.startswith("refused: accuracy ")
    for i in range(4):  # nor do several, one after the other
        hostile = {**trained.arrays, "head.bias": trained.arrays["head.bias"] + np.float32(1e-3 * (i + 1))}
        agent.perform(world.evaluation({**untrained(seed=i), "head.bias": hostile["head.bias"]}, None, run=f"h{i}"))
    assert (agent.status().version, agent.status().snapshots) == (before, shots)


def test_a_model_that_cannot_be_compared_waits_for_the_operator(agents: Any) -> None:
    agent = agents(adapter="none")
    world.train(agent.perform)
    before = agent.status().version
    request = world.evaluation(untrained(24), None, run="hostile")
    larger = to_json(world.SETTINGS.replace(image_size=24))
    reply = agent.perform(dataclasses.replace(request, settings=larger))
    assert reply.served.startswith(("waiting for approval hostile/", "refused: "))
    assert agent.status().version == before
    agent.close()
    again = Agent(agent.config)
    assert again.status().version == before  # a restart promotes nothing
    again.close()


def test_no_new_model_is_served_where_the_owner_says_never(agents: Any) -> None:
    agent = agents(Policy(serve="never"), adapter="none")
    _, reply = world.train(agent.perform)
    assert reply.served == "refused: policy serve: no new model is served here"
    assert agent.status().version == ""


# The audit log


def test_the_audit_log_has_what_left_and_no_values(agents: Any, capsys: pytest.CaptureFixture[str]) -> None:
    agent = agents()
    reply = agent.perform(training(run="one"))
    with pytest.raises(PolicyError):
        agent.perform(training(run="two", batch_size=1))
    done, refused = audit.lines(agent.config.state_folder)
    assert (done["phase"], done["run"], done["round"], done["training"], done["result"]) == (
        "train",
        "one",
        1,
        "t",
        "ok",
    )
    values, *arrays = done["sent"]
    assert "train-loss" in values["name"].split(",")
    assert {one["name"]: one["shape"] for one in arrays} == {
        f"arrays.{name}": list(value.shape) for name, value in reply.arrays.items()
    }
    assert all(len(one["sha256"]) == 64 for one in done["sent"])
    assert (refused["run"], refused["result"]) == ("two", "policy least-batch-size")
    folder = str(agent.config.state_folder)
    assert audit.main(["--state-dir", folder, "--run", "tw"]) == 0
    assert "policy least-batch-size" in (text := capsys.readouterr().out)
    assert "run one" not in text
    assert audit.main(["--state-dir", folder, "--json"]) == 0
    assert [json.loads(line)["run"] for line in capsys.readouterr().out.splitlines()] == ["one", "two"]
    assert audit.main(["--state-dir", f"{folder}/nowhere"]) == 2


def test_what_the_audit_log_cannot_record_does_not_leave(agents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agents()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        agent.perform(Identify(**common()))
    monkeypatch.undo()
    assert agent.perform(Identify(**common())).name == "0"


def test_a_flood_of_refused_messages_displaces_nothing_that_left(tmp_path: Path) -> None:
    log = audit.Audit(tmp_path, limit=1000)
    log.write("train", "ok", run="r")
    for number in range(200):
        log.write("train", "policy phases", run=f"{number}", reason="x" * 80)
    found = list(audit.lines(tmp_path))
    assert [line["run"] for line in found] == ["r", *(str(number) for number in range(200 - len(found) + 1, 200))]
    assert len(found) > 20
    assert len(list(tmp_path.iterdir())) == 1 + audit.FILES
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())


def test_a_message_that_cannot_be_read_is_in_the_audit_log(socket: Any) -> None:
    agent, stub = socket
    message = protobuf.to_work(Identify(**common()).to_record())
    message.config_json = "[" * 100_000
    with pytest.raises(grpc.RpcError):
        stub.Perform(message, timeout=30)
    message.phase = "train\x1b[2J" + "x" * 1000
    with pytest.raises(grpc.RpcError):
        stub.Perform(message, timeout=30)
    unknown, malformed = last(agent), list(audit.lines(agent.config.state_folder))[-2]
    assert (malformed["phase"], malformed["result"]) == ("identify", "ValueError")
    assert unknown["result"] == "ValueError"
    assert "\x1b" not in audit._printable(audit.text_of(unknown))


# The fuzzer


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
    kind, name = int(draw.integers(15)), str(draw.choice(list(arrays)))
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
    count = int(os.environ.get("FEDTTA_FUZZ", "40"))
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
    for number in range(int(os.environ.get("FEDTTA_FUZZ", "40"))):
        request: Any = hostile_request(draw, tmp_path, members)
        if number % 4 == 0:  # what is ordinary
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


def test_the_noise_that_the_owner_wants_leaves_no_image_whatever_the_weights(agents: Any, noise: str) -> None:
    """Of an input of n numbers a clipped update with noise z has a correlation of at most 1 / √(1 + n z²)."""
    agent = agents(dataclasses.replace(OPEN, least_noise=0.3), data=noise)
    members, others = own_images(agent)
    random = np.random.default_rng(0)
    ordinary = {key: random.normal(0, 0.1, value.shape).astype(np.float32) for key, value in chosen_weights().items()}
    for weights in (trap(members), ordinary):
        reply = agent.perform(training(weights, classes=SITE.classes, differential_privacy="model=0.3/1"))
        assert gap(weights, reply.arrays, members, others[:200]) < 0.1


def _layout(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in arrays.items()}
