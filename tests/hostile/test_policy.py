"""The owner's policy: messages that ask for images, labels or paths, or leave out masks and noise, are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta.benchmarks.reconstruction import chosen_weights, correlations, gap, reconstructed, trap
from fedtta.client.agent.core import Agent
from fedtta.client.policy import Policy, PolicyError, statistics_of
from fedtta.client.resources import federation_of
from fedtta.messages.requests import (
    Adapt,
    AdapterRow,
    Identify,
    Masking,
    RefineRates,
    Request,
    ShareKeys,
    Train,
    TrainingTask,
    Unmask,
)
from fedtta.server.methods import METHODS
from fedtta.settings import to_json
from fedtta.tta.registry import info
from fedtta.tta.statistics import STATISTICS
from tests.client.agent import world
from tests.hostile.device import (
    HIDDEN,
    OPEN,
    RUN,
    SECURE,
    SITE,
    TASK,
    TOUCHED,
    agent_in,
    common,
    digits,
    evaluation,
    last,
    masked,
    own_images,
    summary,
    training,
)

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
    "views that fill the memory": (
        "most-memory-mb", evaluation(AdapterRow("r", "memo", {"views": 256, "steps": 256}), adapt_batch_size=200),
    ),
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
    assert statistics_of("auto[probe=100;among=t3a+em],auto[among=bbse]") == {"label_prior", "confusion"}
    assert statistics_of("auto") == statistics_of("auto[among=t3a]") == set()
    assert statistics_of("all") == {"label_prior", "confusion", "block_scores"}


def test_a_list_of_names_has_everything_or_what_it_names(agents: Any) -> None:
    agent = agents(Policy(algorithms="fedavg", adapters="none,tent", statistics="label_prior", phases="*"))
    with pytest.raises(PolicyError, match=r"^policy algorithms: ditto; allowed is fedavg$"):
        agent.perform(dataclasses.replace(training(), task=TrainingTask("t", "ditto")))
    with pytest.raises(PolicyError, match=r"^policy adapters: memo; allowed is none,tent$"):
        agent.perform(evaluation(AdapterRow("r", "memo")))
    with pytest.raises(PolicyError, match=r"^policy adapters: auto; allowed is none,tent$"):
        agent.perform(evaluation(AdapterRow("r", "auto", {"among": "tent"})))
    with pytest.raises(PolicyError, match=r"^policy adapters: memo; allowed is auto,tent$"):
        Policy(adapters="auto,tent")._check_rows([AdapterRow("r", "auto", {"among": "tent+memo"})])
    Policy(adapters="auto,tent")._check_rows([AdapterRow("r", "auto", {"among": "tent"})])
    with pytest.raises(PolicyError, match=r"^policy statistics: confusion; allowed is label_prior$"):
        agent.perform(summary(["confusion"], methods="bbse"))
    assert "label_prior" in agent.perform(summary(["label_prior"], methods="em")).statistics


@pytest.mark.parametrize("phases", ["*", " * ", "*,identify"])
def test_a_star_among_phases_stands_for_all_of_them(phases: str) -> None:
    Policy(phases=phases).check_kind(ADAPTATION.kind, 0)
    Policy(phases=phases)._check_run(Identify(**common()), RUN.replace(collaborations="fedavg"))


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
