from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

import fedtta.tta.cotta
from fedtta.tta.collaborator import shared_parameters
from fedtta.tta.cotta import CoTTA
from tests.tta.networks import conv_network, images, mlp_network, noise, two_head_network, vectors

LR = 0.02  # large: the steps must show
OPTIONS: dict[str, Any] = {"lr": LR, "views": 5, "augment": noise, "seed": 7, "momentum_teacher": 0.9, "restore": 0.3}


def generator(seed: int, *key: int) -> Generator:
    words = np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)
    return Generator().manual_seed(int(words[0]))


def confidence_of(network: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float(torch.softmax(copy.deepcopy(network).train()(x), 1).amax(1).mean())


class Reference(NamedTuple):
    rows: list[Tensor]
    student: nn.Module
    teacher: nn.Module
    averaged: list[bool]


def reference(
    network: nn.Module, batches: list[Tensor], threshold: float = 0.92, average: str = "logits", mu: float = 0.0
) -> Reference:
    """CoTTA as anyone would write it: three networks in training mode, torch.optim, one view and number at a time."""
    source, student, teacher = (copy.deepcopy(network).train() for _ in range(3))
    trained = [
        [p for p in model.parameters() if p.requires_grad]  # of one shape and order in all three
        for model in (source, student, teacher)
    ]
    adam = torch.optim.Adam(trained[1], lr=LR, betas=(0.9, 0.999))
    rows, averaged = [], []
    for step, x in enumerate(batches):
        with torch.no_grad():
            confidence = sum(float(torch.softmax(row, 0).max()) for row in source(x)) / len(x)
            averaged.append(confidence < threshold)
            if averaged[-1]:
                outputs = [teacher(noise(x, generator(7, step, view))) for view in range(5)]
                if average == "probabilities":
                    outputs = [torch.softmax(y, 1) for y in outputs]
                mean = sum(outputs[1:], outputs[0]) / 5
                target = mean if average == "probabilities" else torch.softmax(mean, 1)
            else:
                target = torch.softmax(teacher(x), 1)
        rows.append(target)
        loss = torch.zeros((), dtype=x.dtype)
        for p, logits in zip(target, student(x), strict=True):
            loss = loss - (p * torch.log(torch.softmax(logits, 0))).sum() / len(x)
        far = sum(((new - old.detach()) ** 2).sum() for old, new, _ in zip(*trained, strict=True))
        loss = loss + mu / 2 * far
        adam.zero_grad()
        loss.backward()
        adam.step()
        masks = generator(7, step)
        with torch.no_grad():
            for old, fast, slow in zip(*trained, strict=True):
                slow.copy_(0.9 * slow + 0.1 * fast)
                draws = torch.rand(fast.shape, generator=masks).flatten().tolist()
                for i, draw in enumerate(draws):
                    if draw < 0.3:
                        fast.view(-1)[i] = old.view(-1)[i]
    return Reference(rows, student, teacher, averaged)


@pytest.mark.parametrize(
    ("sure", "average", "mu"),
    [("sure", "logits", 0.0), ("never", "logits", 0.0), ("never", "probabilities", 0.0), ("sure", "logits", 2.0)],
)
@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_it_equals_the_reference(kind: str, sure: str, average: Any, mu: float) -> None:
    """Where the source is sure of some batches, and where it is of none."""
    network: Any = conv_network() if kind == "conv" else mlp_network()
    # A bias before BatchNorm has no gradient but rounding errors, which Adam would make large.
    network[0].bias.requires_grad_(False)
    x = images(15) if kind == "conv" else vectors(15)
    # The first batch is the one the source is least sure of: without views, student and teacher would never part.
    batches = sorted(x.split([6, 2, 7]), key=lambda x: confidence_of(network, x))
    threshold = (
        (confidence_of(network, batches[0]) + confidence_of(network, batches[1])) / 2 if sure == "sure" else 0.92
    )
    want = reference(network, batches, threshold, average, mu)
    cotta = CoTTA(network, threshold=threshold, average=average, proximal=mu, **OPTIONS)
    for batch, rows in zip(batches, want.rows, strict=True):
        torch.testing.assert_close(cotta.predict(batch), rows, atol=1e-9, rtol=0)
    for role, adapted in (("student", want.student), ("teacher", want.teacher)):
        for name, value in shared_parameters(adapted).items():
            got = cotta.trained()[f"{role}.{name}"].detach()
            torch.testing.assert_close(got, value.detach(), atol=1e-9, rtol=0)
    assert any(want.averaged)
    assert all(want.averaged) == (sure == "never")
    sizes = torch.tensor([len(batch) for batch in batches])
    assert cotta.report()["averaged"].tolist() == torch.tensor(want.averaged).repeat_interleave(sizes).tolist()


def test_the_threshold_decides_by_the_mean_confidence_of_the_source() -> None:
    network, x = conv_network(), images(6)
    with torch.no_grad():
        confidence = torch.softmax(copy.deepcopy(network).train()(x), 1).amax(1)
    mean = float(confidence.mean())
    for threshold, averaged in ((mean - 1e-6, False), (mean + 1e-6, True)):
        cotta = CoTTA(network, threshold=threshold, **OPTIONS)
        cotta.predict(x)
        assert cotta.report()["averaged"].tolist() == [averaged] * 6
        torch.testing.assert_close(cotta.report()["confidence"], confidence)


@pytest.mark.parametrize("together", [1, 13, 1000])
def test_several_views_in_one_pass_are_views_one_by_one(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each view keeps its own batch statistics."""
    network, x = conv_network(), images(6)
    want = reference(network, [x]).rows[0]
    monkeypatch.setattr(fedtta.tta.cotta, "PASS", together)
    torch.testing.assert_close(CoTTA(network, **OPTIONS).predict(x), want, atol=1e-12, rtol=0)


def test_the_first_prediction_without_views_is_the_source_with_batch_statistics() -> None:
    network, x = two_head_network(), images(6)
    with torch.no_grad():
        want = torch.softmax(copy.deepcopy(network).train()(x), 1)
    cotta = CoTTA(network, threshold=0.0, augment=noise)
    torch.testing.assert_close(cotta.predict(x), want, atol=1e-13, rtol=0)


def test_identical_views_are_the_plain_prediction() -> None:
    network, x = conv_network(), images(12)
    plain = CoTTA(network, threshold=0.0, **OPTIONS)
    same = CoTTA(network, threshold=1.0, **{**OPTIONS, "augment": lambda x, generator: x.clone()})
    for batch in x.split(6):
        torch.testing.assert_close(same.predict(batch), plain.predict(batch), atol=1e-12, rtol=0)


def test_restoration_by_hand() -> None:
    """p = 1 leaves the student at the source, p = 0 moves every number; the teacher has a tenth of the way."""
    network, x = two_head_network(), images(6)
    never, always = (CoTTA(network, **{**OPTIONS, "restore": p}) for p in (0.0, 1.0))
    source = never.shared("all")
    for cotta in (never, always):
        cotta.predict(x)
    for name, value in always.trained().items():
        if name.startswith("student."):
            assert torch.equal(value, source[name])
            moved = never.trained()[name].detach() - source[name]
            teacher = name.replace("student.", "teacher.")
            torch.testing.assert_close(never.trained()[teacher] - source[teacher], 0.1 * moved, atol=1e-12, rtol=0)
            torch.testing.assert_close(always.trained()[teacher], never.trained()[teacher])
    assert bool((never.trained()["student.head.bias"] != source["student.head.bias"]).any())


def test_the_share_restored_is_the_probability() -> None:
    """Over 4,000 weights, p = 0.2: 5 standard deviations are 0.03."""
    wide: Any = nn.Sequential(nn.Linear(20, 200), nn.BatchNorm1d(200), nn.Tanh(), nn.Linear(200, 4)).double()
    cotta = CoTTA(wide, **{**OPTIONS, "restore": 0.2, "threshold": 1.0})
    x = torch.randn(8, 20, generator=Generator().manual_seed(0), dtype=torch.float64)
    masks: list[Tensor] = []
    for _ in range(2):
        cotta.predict(x)
        masks.append(torch.eq(cotta.trained()["student.0.weight"], wide[0].weight))
        assert float(masks[-1].double().mean()) == pytest.approx(0.2, abs=0.03)
    both = float((masks[0] & masks[1]).double().mean())  # drawn independently: 0.2 of 0.2
    assert both == pytest.approx(0.04, abs=0.02)


@settings(max_examples=10, deadline=None)
@given(alpha=st.floats(0, 1), lr=st.floats(1e-4, 0.1))
def test_the_teacher_lies_between_where_it_was_and_the_student(alpha: float, lr: float) -> None:
    network = mlp_network()
    cotta = CoTTA(network, **{**OPTIONS, "momentum_teacher": alpha, "restore": 0.0, "lr": lr})
    cotta.predict(vectors(6))
    for name, old in network.named_parameters():
        low, high = torch.minimum(old, cotta._student[name]), torch.maximum(old, cotta._student[name])
        assert bool(((cotta._teacher[name] >= low - 1e-15) & (cotta._teacher[name] <= high + 1e-15)).all())


def test_one_step_follows_the_finite_difference_gradient() -> None:
    """Adam's first step is the sign of the gradient."""
    network: Any = mlp_network()
    x, want = vectors(6), reference(mlp_network(), [vectors(6)]).rows[0]

    def loss(bias: Tensor) -> float:
        moved: Any = copy.deepcopy(network).train()
        with torch.no_grad():
            moved[1].bias.copy_(bias)
            return float(-(want * torch.log_softmax(moved(x), 1)).sum(1).mean())

    start = network[1].bias.detach()
    cotta = CoTTA(network, **{**OPTIONS, "restore": 0.0})
    cotta.predict(x)
    for i in range(len(start)):
        step = torch.zeros_like(start)
        step[i] = 1e-5
        slope = (loss(start + step) - loss(start - step)) / 2e-5
        moved = float((cotta.trained()["student.1.bias"][i] - start[i]).detach())
        assert moved == pytest.approx(-LR * slope / (abs(slope) + 1e-8), abs=1e-6)


def test_restoration_goes_to_the_source_also_after_a_reception() -> None:
    network = conv_network()
    cotta = CoTTA(network, **{**OPTIONS, "restore": 1.0})
    cotta.load_shared({name: value + 1 for name, value in cotta.shared("all").items()})
    cotta.predict(images(6))
    for name, value in network.named_parameters():
        assert torch.equal(cotta.trained()[f"student.{name}"], value)
        assert not torch.equal(cotta.trained()[f"teacher.{name}"], value)


def test_all_is_trained_but_frozen_parameters_and_the_personal_head() -> None:
    network: Any = two_head_network()
    network.encoder[0].weight.requires_grad_(False)
    cotta = CoTTA(network, **OPTIONS)
    names = {name for name, _ in network.named_parameters()} - {"encoder.0.weight", "personal_head.weight"}
    assert set(cotta.trained()) == {f"{role}.{name}" for role in ("student", "teacher") for name in names}
    cotta.predict(images(6))
    assert cotta.normalisation() == {}
    network.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of TwoHead may be trained"):
        CoTTA(network, **OPTIONS)


def test_domain_is_the_students() -> None:
    network, x = conv_network(), images(12)
    cotta = CoTTA(network, **OPTIONS)
    cotta.predict(x[:6])
    student: Any = copy.deepcopy(network)
    student.load_state_dict({k.removeprefix("student."): v for k, v in cotta.trained().items()}, strict=False)
    cotta.predict(x[6:])
    with torch.no_grad():
        values = student[0](x[6:]).transpose(0, 1).flatten(1)  # (C, B H W)
    mean, variance = cotta.domain()["1"]
    torch.testing.assert_close(mean, values.mean(1), atol=1e-12, rtol=0)
    torch.testing.assert_close(variance, values.var(1, correction=0), atol=1e-12, rtol=0)


def test_one_vector_is_normalised_by_the_source() -> None:
    network, x = mlp_network(), vectors(1)
    with torch.no_grad():
        want = torch.softmax(network(x), 1)
    cotta = CoTTA(network, threshold=0.0, **OPTIONS)
    torch.testing.assert_close(cotta.predict(x), want, atol=1e-14, rtol=0)
    views = CoTTA(network, threshold=1.0, **OPTIONS)
    with torch.no_grad():
        logits = torch.cat([network(noise(x, generator(7, 0, view))) for view in range(5)]).mean(0, keepdim=True)
    torch.testing.assert_close(views.predict(x), torch.softmax(logits, 1), atol=1e-14, rtol=0)
