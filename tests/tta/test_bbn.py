"""BBN against a plain reimplementation (loops, autograd, torch's Adam); what is kept, shared, reset and refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from fedtta.tta.bbn import BBN
from tests.tta.networks import CLASSES, conv_network, images, mlp_network, noise, two_head_network, vectors

H0 = 0.9  # δ between the entropies of the small networks' outputs, so that the mask is mixed
LR = 0.05  # large: a step must show
Moments = tuple[Tensor, Tensor]  # of one class: mean [C], variance [C]


def same(x: Tensor, generator: Generator) -> Tensor:
    return x


def make(network: nn.Module, **options: object) -> BBN:
    return BBN(network, CLASSES, **{"augment": same, "h0": H0, "lr": LR, **options})  # type: ignore[arg-type]


class Reference:
    """ALGORITHMS, section 4, steps (i) to (iii), for a Sequential: explicit loops, autograd and `torch.optim.Adam`."""

    def __init__(
        self,
        network: nn.Sequential,
        consistency: float = 0.5,
        momentum: float = 0.01,
        between: int = CLASSES,
        proximal: float = 0.0,
    ) -> None:
        self.network, self.between = network.eval(), between  # divisor of the variance between classes
        self.consistency, self.momentum, self.threshold = consistency, momentum, H0 * math.log(CLASSES)
        self.norms = [i for i, m in enumerate(network) if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        layers: dict[int, Any] = {i: network[i] for i in self.norms}
        self.affine = {i: (self._leaf(layer.weight), self._leaf(layer.bias)) for i, layer in layers.items()}
        self.statistics: dict[str, dict[int, list[Moments]]] = {
            role: {i: [(m.running_mean, m.running_var) for _ in range(CLASSES)] for i, m in layers.items()}
            for role in ("teacher", "student")
        }
        self.received = {i: tuple(leaf.detach().clone() for leaf in pair) for i, pair in self.affine.items()}
        self.proximal = proximal  # μ of FedProx
        self.adam = torch.optim.Adam([leaf for pair in self.affine.values() for leaf in pair], lr=LR)
        self.confident: list[bool] = []

    @staticmethod
    def _leaf(value: Tensor) -> Tensor:
        return value.detach().clone().requires_grad_()

    def run(self, role: str, x: Tensor, labels: list[int] | None = None) -> Tensor:
        for i, module in enumerate(self.network):
            x = self.normalise(self.statistics[role], i, x, labels) if i in self.norms else module(x)
        return x

    def normalise(self, statistics: dict[int, list[Moments]], i: int, x: Tensor, labels: list[int] | None) -> Tensor:
        if labels is not None:
            statistics[i] = [self.updated(k, old, x.detach(), labels) for k, old in enumerate(statistics[i])]
        mean, variance = self.balanced(statistics[i])
        shape = (1, -1) + (1,) * (x.ndim - 2)
        z = (x - mean.view(shape)) / torch.sqrt(variance.view(shape) + 1e-5)
        weight, bias = self.affine[i]
        return weight.view(shape) * z + bias.view(shape)

    def updated(self, k: int, old: Moments, x: Tensor, labels: list[int]) -> Moments:
        mean, variance = old
        mine = [x[i].reshape(x.shape[1], -1) for i, label in enumerate(labels) if label == k]  # [C, H W] each
        eta = min(self.momentum, 1 / len(mine)) if mine else 0.0
        delta, change = torch.zeros_like(mean), torch.zeros_like(mean)
        for z in mine:
            delta = delta + eta * (z.mean(1) - mean)
            change = change + eta * (((z - mean[:, None]) ** 2).mean(1) - variance)
        return mean + delta, variance - delta**2 + change

    def balanced(self, statistics: list[Moments]) -> Moments:
        mean = sum(m for m, _ in statistics) / CLASSES
        apart = sum((m - mean) ** 2 for m, _ in statistics) / self.between
        return mean, sum(v for _, v in statistics) / CLASSES + apart  # type: ignore[return-value]

    def predict(self, x: Tensor, for_teacher: Tensor, for_student: Tensor) -> Tensor:
        with torch.no_grad():
            first = torch.softmax(self.run("teacher", x), 1)
            source = torch.softmax(self.network(x), 1)
        labels = [int(row.argmax()) for row in first]
        teacher = torch.softmax(self.run("teacher", for_teacher, labels), 1)
        student = torch.softmax(self.run("student", for_student, labels), 1)
        loss = torch.zeros((), dtype=x.dtype)
        for i in range(len(x)):
            target = teacher[i].tolist()
            entropy = -sum(p * math.log(p) for p in target)
            self.confident.append(entropy < self.threshold)
            if self.confident[-1]:
                loss = loss - student[i, target.index(max(target))].log() / len(x)
            loss = loss + self.consistency * ((teacher[i] - source[i]) ** 2).sum() / (len(x) * CLASSES)
        for i, pair in self.affine.items():
            for leaf, old in zip(pair, self.received[i], strict=True):
                loss = loss + self.proximal / 2 * ((leaf - old) ** 2).sum()
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        return first


def check_equal(adapter: BBN, reference: Reference) -> None:
    trained = adapter.trained()
    for i, pair in reference.affine.items():
        torch.testing.assert_close(trained[f"{i}.weight"].detach(), pair[0].detach(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(trained[f"{i}.bias"].detach(), pair[1].detach(), rtol=1e-9, atol=1e-9)
    statistics = adapter.normalisation()
    for role, layers in reference.statistics.items():
        for i, classes in layers.items():
            for kind, which in (("mean", 0), ("variance", 1)):
                wanted = torch.stack([pair[which] for pair in classes])
                torch.testing.assert_close(statistics[f"{role}.{i}.class_{kind}"], wanted, rtol=1e-9, atol=1e-9)
    for name, pair in adapter.domain().items():
        wanted_pair = reference.balanced(reference.statistics["student"][int(name)])
        torch.testing.assert_close(pair, wanted_pair, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("consistency", "proximal"), [(0.5, 0.0), (0.0, 0.0), (20.0, 0.0), (0.5, 2.0)])
@pytest.mark.parametrize("kind", ["images", "vectors"])
def test_stream_equals_a_plain_reimplementation(kind: str, consistency: float, proximal: float) -> None:
    network, x = (conv_network(), 9 * images(30)) if kind == "images" else (mlp_network(), 3 * vectors(30))
    with torch.no_grad():
        network.get_parameter("9.weight" if kind == "images" else "3.weight").mul_(8)  # some samples are clear
    adapter = make(network, consistency=consistency, momentum=0.1, proximal=proximal)
    reference = Reference(network, consistency, momentum=0.1, proximal=proximal)
    for batch in x.split([12, 1, 17]):
        torch.testing.assert_close(adapter.predict(batch), reference.predict(batch, batch, batch), rtol=0, atol=1e-9)
        check_equal(adapter, reference)
    assert adapter.report()["confident"].tolist() == reference.confident
    assert 0 < sum(reference.confident) < 30  # the mask matters
    start = network.state_dict()
    assert not torch.allclose(adapter.trained()["1.weight"], start["1.weight"], atol=LR / 2)


@pytest.mark.parametrize("kind", ["images", "vectors"])
def test_the_ancestors_variance_between_classes(kind: str) -> None:
    network, x = (conv_network(), 9 * images(30)) if kind == "images" else (mlp_network(), 3 * vectors(30))
    adapter = make(network, between="sample", momentum=0.1)
    reference = Reference(network, momentum=0.1, between=CLASSES - 1)
    for batch in x.split([12, 1, 17]):
        torch.testing.assert_close(adapter.predict(batch), reference.predict(batch, batch, batch), rtol=0, atol=1e-9)
        check_equal(adapter, reference)
    other = make(network, momentum=0.1)
    other.predict(x)
    adapter.reset()
    adapter.predict(x)
    assert float((other.predict(x) - adapter.predict(x)).abs().max()) > 1e-4


def test_one_class_has_no_sample_variance() -> None:
    network = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    with pytest.raises(ValueError, match="between='sample' divides by K - 1 and needs two classes"):
        BBN(network, 1, augment=same, between="sample")


def view_of(batches: int, x: Tensor) -> Tensor:
    """The same views for a step, whatever the generator: so that the reference sees them too."""
    return x + 0.2 * torch.randn(x.shape, generator=Generator().manual_seed(batches), dtype=x.dtype)


@pytest.mark.parametrize("who", ["callable", "student", "teacher"])
def test_views_go_to_the_student_or_to_the_teacher(who: str) -> None:
    network, x = conv_network(), images(24)
    adapter, reference = make(network, augment=same if who == "callable" else who), Reference(network)
    steps = iter(range(10))
    adapter.augment = lambda batch, generator: view_of(next(steps), batch)
    for step, batch in enumerate(x.split(12)):
        view = view_of(step, batch)
        seen = (view, batch) if who == "teacher" else (batch, view)
        torch.testing.assert_close(adapter.predict(batch), reference.predict(batch, *seen), rtol=0, atol=1e-9)
        check_equal(adapter, reference)


def test_teacher_and_student_share_weights_but_not_statistics() -> None:
    network = two_head_network()
    before = copy.deepcopy(network.state_dict())
    adapter = make(network, augment=noise)
    pairs = zip(adapter._teacher.named_parameters(), adapter._student.named_parameters(), strict=True)
    assert all(name == other and one is two for (name, one), (other, two) in pairs)
    for batch in images(20).split(10):
        adapter.predict(batch)
    arrays = adapter.normalisation()
    layer = "encoder.1.class_mean"
    assert not torch.equal(arrays[f"teacher.{layer}"], arrays[f"student.{layer}"])
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert set(adapter.trained()) == {f"encoder.{i}.{part}" for i in (1, 4) for part in ("weight", "bias")}
    assert set(adapter.domain()) == {"encoder.1", "encoder.4"}


def test_a_class_never_seen_keeps_the_source_values() -> None:
    network, adapter = conv_network(), make(conv_network())
    seen: set[int] = set()
    for batch in images(20).split(10):
        seen |= set(adapter.predict(batch).argmax(1).tolist())
    unseen = [k for k in range(CLASSES) if k not in seen]
    assert unseen
    for name, value in adapter.normalisation().items():
        source = network.state_dict()[f"{name.split('.')[1]}.running_{'mean' if name.endswith('mean') else 'var'}"]
        assert torch.equal(value[unseen], source.expand(len(unseen), -1))
        assert not torch.equal(value[sorted(seen)], source.expand(len(seen), -1))


def test_defaults_follow_the_number_of_classes() -> None:
    few, many = (BBN(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, k)), k, augment=same) for k in (99, 100))
    assert few.threshold == pytest.approx(0.05 * math.log(99))
    assert many.threshold == pytest.approx(0.2 * math.log(100))
    assert few._layers["student.0"].momentum == pytest.approx(0.0495)
    assert BBN(two_head_network(), augment=same).num_classes == CLASSES


def without_weights() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, affine=False), nn.ReLU(), nn.Linear(6, CLASSES)).double()


def frozen() -> nn.Module:
    return mlp_network().requires_grad_(False)


@pytest.mark.parametrize("network", [without_weights, frozen])
def test_without_weights_to_train_statistics_still_adapt(network: Callable[[], nn.Module]) -> None:
    adapter, x = make(network(), momentum=0.5, proximal=0.1), vectors(20)
    first = adapter.predict(x)
    assert adapter.trained() == {}
    assert not torch.allclose(adapter.predict(x), first, atol=1e-3)
    other = make(network(), momentum=0.5, proximal=0.1)
    other.load_state_dict(adapter.state_dict())
    assert torch.equal(other.predict(x), adapter.predict(x))


def test_a_mixture_rebalances_the_layers_and_keeps_the_moments() -> None:
    one, other = make(conv_network(), augment=noise), make(conv_network(), augment=noise, seed=1)
    for batch in images(30).split(10):
        one.predict(batch)
        other.predict(1 - batch)
    moments = {name: value for name, value in one.state_dict().items() if name.startswith("optimizer.")}
    theirs = other.shared("all")
    one.load_shared({name: (value + theirs[name]) / 2 for name, value in one.shared("all").items()})
    after, statistics = one.state_dict(), one.normalisation()
    assert all(torch.equal(value, after[name]) for name, value in moments.items())
    for name, (mean, variance) in one.domain().items():
        means, variances = statistics[f"student.{name}.class_mean"], statistics[f"student.{name}.class_variance"]
        torch.testing.assert_close(mean, means.mean(0))
        torch.testing.assert_close(variance, variances.mean(0) + means.var(0, correction=0))


def test_negative_variances_of_others_are_refused() -> None:
    adapter = make(conv_network())
    arrays = adapter.shared("statistics")
    arrays["student.1.class_variance"][0, 0] = -1e-3
    with pytest.raises(ValueError, match=r"student\.1\.class_variance holds negative variances"):
        adapter.load_shared(arrays)


@pytest.mark.parametrize("where", ["image", "student", "teacher"])
def test_what_is_not_finite_is_refused_and_leaves_no_trace(where: str) -> None:
    x = images(6)
    poison = False

    def augment(batch: Tensor, generator: Generator) -> Tensor:
        view = batch.clone()
        view[2] = float("inf") if poison else view[2]
        return view

    adapter = make(conv_network(), augment=augment if where != "teacher" else "teacher")
    adapter.augment = augment
    adapter.predict(x)
    before, report = adapter.state_dict(), adapter.report()
    poison = True
    if where == "image":
        x[4] = float("nan")
    with pytest.raises(ValueError, match=r"\[4\]" if where == "image" else rf"{where}'s output for samples \[.*2.*\]"):
        adapter.predict(x)
    assert all(torch.equal(value, before[name]) for name, value in adapter.state_dict().items())
    assert torch.equal(adapter.report()["entropy"], report["entropy"])
    poison = False
    other = make(conv_network(), augment=augment)
    other.predict(images(6))
    assert adapter._layers["student.1"]._labels is None


def test_statistics_that_overflow_are_refused() -> None:
    # The squares overflow in float32, and a layer that divides by an infinite deviation gives finite numbers.
    network = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1))
    adapter = BBN(network, 1, augment=lambda x, generator: x * 1e25, momentum=0.1)
    before = adapter.state_dict()
    with pytest.raises(ValueError, match=r"the batch makes student\.0\.class_variance not finite"):
        adapter.predict(vectors(6).float())
    assert all(torch.equal(value, before[name]) for name, value in adapter.state_dict().items())


def test_bad_networks_and_views_are_refused() -> None:
    network = two_head_network()
    network.encoder, network.personal_head = nn.Flatten(), nn.Sequential(nn.BatchNorm1d(6))  # type: ignore[assignment]
    with pytest.raises(ValueError, match="TwoHead has no BatchNorm layer outside the personal head"):
        BBN(network)


def test_channels_last_gives_the_same_numbers() -> None:
    one, other = make(conv_network(), augment=noise), make(conv_network(), augment=noise)
    for batch in images(24).split(12):
        last = batch.contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(one.predict(batch), other.predict(last))
