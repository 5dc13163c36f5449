from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from fedtta.models.two_head import TwoHead
from fedtta.tta.rotta import Memory, RobustNorm, RoTTA
from tests.tta import networks
from tests.tta.networks import CLASSES, images, noise, vectors

#: Small enough that a few batches hold many updates, with rates at which they show.
OPTIONS = {"lr": 0.05, "capacity": 6, "update_every": 5, "alpha": 0.2, "nu": 0.3, "augment": noise, "seed": 3}


def sharpened(network: nn.Module, head: nn.Linear, x: Tensor) -> None:
    """Make a network's predictions of `x` certain and of different classes."""
    with torch.no_grad():
        x = x.to(head.weight.dtype)
        head.weight *= 6 / (network(x) - network(x).mean(0)).std()
        head.bias -= network(x).mean(0)


def conv_network() -> nn.Sequential:
    network = networks.conv_network()
    sharpened(network, network[-1], images(40))  # type: ignore[arg-type]
    return network


def mlp_network() -> nn.Sequential:
    network = networks.mlp_network()
    sharpened(network, network[-1], vectors(40))  # type: ignore[arg-type]
    return network


def two_head_network(dtype: torch.dtype = torch.float64) -> TwoHead:
    network = networks.two_head_network(dtype)
    sharpened(network, network.head, images(40))
    return network


class PlainMemory:
    """Algorithm 1 as it is printed: everything in one list, everything grows older one by one."""

    def __init__(self, capacity: int, classes: int, lambda_t: float, lambda_u: float) -> None:
        self.capacity, self.classes, self.lambda_t, self.lambda_u = capacity, classes, lambda_t, lambda_u
        self.items: list[dict] = []

    def score(self, item: dict) -> float:
        timeliness = 1 / (1 + math.exp(-item["age"] / self.capacity))
        return self.lambda_t * timeliness + self.lambda_u * item["uncertainty"] / math.log(self.classes)

    def add(self, sample: object, label: int, uncertainty: float) -> None:
        new = {"sample": sample, "label": label, "uncertainty": uncertainty, "age": 0}
        count = [sum(item["label"] == c for item in self.items) for c in range(self.classes)]
        if count[label] < self.capacity / self.classes:
            if len(self.items) < self.capacity:
                self.items.append(new)
            else:
                self.replace(new, [c for c in range(self.classes) if count[c] == max(count)])
        else:
            self.replace(new, [label])
        for item in self.items:
            item["age"] += 1

    def replace(self, new: dict, crowded: list[int]) -> None:
        worst = None
        for c in crowded:
            for item in self.items:
                if item["label"] == c and (worst is None or self.score(item) >= self.score(worst)):
                    worst = item
        if self.score(worst) > self.score(new):
            self.items = [item for item in self.items if item is not worst] + [new]

    def sorted(self) -> list[dict]:
        return sorted(self.items, key=lambda item: item["label"])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), capacity=st.integers(1, 12), classes=st.integers(2, 5))
def test_memory_is_algorithm_1(data: st.DataObject, capacity: int, classes: int) -> None:
    lambda_t, lambda_u = data.draw(st.sampled_from([(1.0, 1.0), (0.0, 1.0), (2.0, 0.0), (0.5, 3.0)]))
    stream = data.draw(
        st.lists(st.tuples(st.integers(0, classes - 1), st.sampled_from([0, 0.3, 0.6, 0.61])), max_size=40)
    )
    memory, plain = Memory(capacity, classes, lambda_t, lambda_u), PlainMemory(capacity, classes, lambda_t, lambda_u)
    for number, (label, uncertainty) in enumerate(stream):
        kept = memory.add(torch.tensor([float(number)]), label, uncertainty)
        plain.add(number, label, uncertainty)
        want = plain.sorted()
        samples, ages = memory.content()
        assert kept == (number in [item["sample"] for item in want])
        assert samples.flatten().tolist() == [item["sample"] for item in want]
        assert ages.tolist() == [item["age"] / capacity for item in want]
        assert len(memory) == len(want) <= capacity
        labels = memory.state()["labels"].tolist()
        assert labels == [item["label"] for item in want]
        assert all(labels.count(label) < capacity / classes + 1 for label in labels)


def test_memory_by_hand() -> None:
    # N = 2, K = 2: one place a class. Scores: U / ln 2 + 1 / (1 + exp(-A / 2)).
    memory, half = Memory(2, 2), math.log(2) / 2

    def ids() -> list[float]:
        return memory.content()[0].tolist()

    assert memory.add(torch.tensor(1.0), 0, half)  # class 0 is not full
    assert not memory.add(torch.tensor(2.0), 0, 1.4 * half)  # 0.7 + 0.5 against 0.5 + 0.622 (A = 1): not worse
    assert ids() == [1]
    assert memory.add(torch.tensor(3.0), 0, 1.4 * half)  # now against 0.5 + 0.731 (A = 2): drives it out
    assert memory.add(torch.tensor(4.0), 1, 2 * half)
    assert ids() == [3, 4]
    assert memory.content()[1].tolist() == [1.0, 0.5]  # ages 2 and 1, in memory sizes


def test_a_full_memory_makes_room_in_the_largest_class() -> None:
    memory = Memory(4, 3, lambda_t=0.0)  # 4/3 places a class: two samples may come, and four are all
    for number, label in enumerate([0, 0, 1, 2]):
        assert memory.add(torch.tensor(float(number)), label, 0.1 * (number + 1))
    assert memory.add(torch.tensor(4.0), 2, 0.05)  # class 2 has one: the worse of class 0 goes
    assert memory.content()[0].tolist() == [0, 2, 3, 4]
    assert not memory.add(torch.tensor(5.0), 1, 0.5)  # class 1 has one, the largest is class 2: none is worse


def test_memory_keeps_copies_and_copies_are_independent() -> None:
    memory, sample = Memory(2, 2), torch.ones(3)
    memory.add(sample, 0, 0.1)
    sample.zero_()
    other = memory.copy()
    other.add(torch.zeros(3), 1, 0.1)
    assert memory.content()[0].tolist() == [[1, 1, 1]]
    assert len(other) == 2


def test_memory_state_round_trip() -> None:
    generator = np.random.default_rng(0)
    memory = Memory(7, 3)
    stream = [(torch.full((2, 2), float(i)), int(generator.integers(3)), float(generator.random())) for i in range(40)]
    assert len(memory.loaded(memory.state())) == 0
    for item in stream[:20]:
        memory.add(*item)
    other = memory.loaded(memory.state())
    for item in stream[20:]:
        assert memory.add(*item) == other.add(*item)
    for name, value in memory.state().items():
        assert torch.equal(other.state()[name], value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": torch.tensor([0, 3])}, "from 0 to 2"),
        ({"labels": torch.tensor([0.0, 1.0])}, "integers"),
        ({"ages": torch.tensor([0, 1])}, "1 or more"),
        ({"uncertainties": torch.tensor([-1.0, 1.0])}, "0 or more"),
        ({"samples": torch.zeros(3, 1)}, "shapes"),
        ({"ages": torch.tensor([1])}, "shapes"),
        (
            {name: torch.ones(5, dtype=torch.int64) for name in ("samples", "labels", "uncertainties", "ages")},
            "capacity=4",
        ),
    ],
)
def test_bad_memory_states_are_refused(changes: dict[str, Tensor], message: str) -> None:
    memory = Memory(4, 3)
    memory.add(torch.zeros(1), 0, 0.1)
    memory.add(torch.zeros(1), 1, 0.1)
    with pytest.raises(ValueError, match=message):
        memory.loaded({**memory.state(), **changes})


@pytest.mark.parametrize(("alpha", "shape"), [(0.3, (6, 4, 3, 5)), (1.0, (6, 4, 2, 2)), (0.3, (6, 4)), (0.4, (1, 4))])
def test_robust_norm_is_its_formula(alpha: float, shape: tuple[int, ...]) -> None:
    generator = Generator().manual_seed(0)
    layer = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(4).double()
    for value, low in ((layer.running_mean, -1), (layer.running_var, 0.5), (layer.weight, 0.5), (layer.bias, -1)):
        value.data = low + torch.rand(4, generator=generator, dtype=torch.float64)
    robust = RobustNorm(layer, alpha)
    x = 3 * torch.rand(shape, generator=generator, dtype=torch.float64) + 1
    layer.eval()
    torch.testing.assert_close(robust(x), layer(x), atol=1e-12, rtol=0)  # as it is
    want, means, variances = torch.empty_like(x), layer.running_mean.clone(), layer.running_var.clone()
    for c in range(4):
        values = x[:, c].flatten().tolist()
        mean = sum(values) / len(values)
        variance = sum((v - mean) ** 2 for v in values) / len(values)
        means[c] = (1 - alpha) * means[c] + alpha * mean
        variances[c] = (1 - alpha) * variances[c] + alpha * variance
        gain, offset = layer.weight.tolist()[c], layer.bias.tolist()[c]
        want[:, c] = (x[:, c] - means[c]) / math.sqrt(float(variances[c]) + layer.eps) * gain + offset
    robust.updating = True
    torch.testing.assert_close(robust(x).detach(), want, atol=1e-10, rtol=0)
    torch.testing.assert_close(robust.running_mean, means)
    torch.testing.assert_close(robust.running_var, variances)


def test_the_gradient_passes_through_the_statistics() -> None:
    robust = RobustNorm(nn.BatchNorm1d(2, affine=False).double(), 0.4)
    robust.updating = True
    start = robust.running_mean.clone(), robust.running_var.clone()

    def forward(x: Tensor) -> Tensor:
        robust.running_mean.copy_(start[0])
        robust.running_var.copy_(start[1])
        return robust(x)

    x = torch.randn(3, 2, generator=Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(forward, (x,))


def plain_forward(layers: nn.Sequential, x: Tensor, running: dict, alpha: float | None) -> Tensor:
    """Run a Sequential; BatchNorm by hand, with statistics (mean, variance) by index that move if there is an alpha."""
    for i, layer in enumerate(layers):
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            x = layer(x)
            continue
        rows = x.transpose(0, 1).flatten(1)  # [C, values]
        mean, variance = running[i]
        if alpha is not None:
            batch_mean = rows.sum(1) / rows.shape[1]
            mean = (1 - alpha) * mean + alpha * batch_mean
            variance = (1 - alpha) * variance + alpha * ((rows - batch_mean[:, None]) ** 2).sum(1) / rows.shape[1]
            running[i] = mean.detach(), variance.detach()
        shape = (1, -1) + (1,) * (x.ndim - 2)
        x = (x - mean.view(shape)) / (variance.view(shape) + layer.eps).sqrt()
        x = x * layer.weight.view(shape) + layer.bias.view(shape)
    return x


def plain_rotta(
    make: Callable[[], nn.Sequential], batches: list[Tensor], proximal: float, options: dict
) -> list[Tensor]:
    """RoTTA straight from the paper: two networks, Adam, the plain memory."""
    student, teacher = make(), make()
    norms = [i for i, layer in enumerate(student) if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    running = [{i: (net[i].running_mean, net[i].running_var) for i in norms} for net in (student, teacher)]
    parameters = [p for i in norms for p in (student[i].weight, student[i].bias)]
    start = [p.detach().clone() for p in parameters]
    averaged = [p for i in norms for p in (teacher[i].weight, teacher[i].bias)]
    moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in parameters]
    memory, seen, updates, results = PlainMemory(options["capacity"], CLASSES, 1.0, 1.0), 0, 0, []
    for batch in batches:
        with torch.no_grad():
            results.append(torch.softmax(plain_forward(teacher, batch, running[1], None), 1))
        for x, row in zip(batch, results[-1].tolist(), strict=True):
            memory.add(x, row.index(max(row)), -sum(v * math.log(v) for v in row))
            seen += 1
            if seen % options["update_every"]:
                continue
            items = memory.sorted()
            x_all = torch.stack([item["sample"] for item in items])
            key = np.random.SeedSequence(options["seed"], spawn_key=(updates,)).generate_state(1, np.uint64)[0]
            view = options["augment"](x_all, Generator().manual_seed(int(key)))
            target = torch.softmax(plain_forward(teacher, x_all, running[1], options["alpha"]), 1).detach()
            predicted = torch.softmax(plain_forward(student, view, running[0], options["alpha"]), 1)
            loss = sum((a - b).pow(2).sum() for a, b in zip(parameters, start, strict=True)) * proximal / 2
            for item, wanted, given_ in zip(items, target, predicted, strict=True):
                age = item["age"] / options["capacity"]
                weight = math.exp(-age) / (1 + math.exp(-age))
                loss = loss - weight * (wanted * given_.log()).sum() / len(items)
            gradients = torch.autograd.grad(loss, parameters)
            updates += 1
            with torch.no_grad():
                for p, g, pair in zip(parameters, gradients, moments, strict=True):  # Adam
                    pair[0] = 0.9 * pair[0] + 0.1 * g
                    pair[1] = 0.999 * pair[1] + 0.001 * g**2
                    step = pair[0] / (1 - 0.9**updates), (pair[1] / (1 - 0.999**updates)).sqrt() + 1e-8
                    p -= options["lr"] * step[0] / step[1]
                for old, new in zip(averaged, parameters, strict=True):
                    old.copy_((1 - options["nu"]) * old + options["nu"] * new)
    return results


@pytest.mark.parametrize("proximal", [0.0, 5.0])
@pytest.mark.parametrize(("make", "stream"), [(conv_network, images), (mlp_network, vectors)])
def test_a_stream_equals_the_definition(make: Callable, stream: Callable, proximal: float) -> None:
    x = stream(41)
    batches = list(x.split([3, 1, 13, 0, 24]))
    rotta = RoTTA(make(), num_classes=CLASSES, proximal=proximal, **OPTIONS)  # type: ignore[arg-type]
    got = [rotta.predict(batch) for batch in batches]
    for mine, want in zip(got, plain_rotta(make, batches, proximal, OPTIONS), strict=True):
        torch.testing.assert_close(mine, want, atol=1e-9, rtol=0)
    with torch.no_grad():
        assert float((got[-1] - torch.softmax(make()(batches[-1]), 1)).abs().max()) > 1e-3
    whole = torch.cat(got)
    want = -(whole * whole.log()).sum(1)
    torch.testing.assert_close(rotta.report()["entropy"], want, atol=1e-9, rtol=0)
    if proximal:  # updates after the first of a batch are pulled back
        free = RoTTA(make(), num_classes=CLASSES, **OPTIONS)  # type: ignore[arg-type]
        assert not torch.allclose(torch.cat([free.predict(batch) for batch in batches])[-24:], whole[-24:], atol=1e-6)


def make_rotta(**changes: object) -> RoTTA:
    return RoTTA(two_head_network(), **{**OPTIONS, **changes})  # type: ignore[arg-type]


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def test_what_is_shared_is_affine_and_statistics_never_samples() -> None:
    rotta = make_rotta()
    rotta.predict(images(20))
    affine, statistics = rotta.shared("affine"), rotta.shared("statistics")
    layers = [f"{role}.encoder.{i}" for role in ("student", "teacher") for i in (1, 4)]
    assert set(affine) == {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}
    assert set(statistics) == {f"{layer}.{part}" for layer in layers for part in ("running_mean", "running_var")}
    assert set(rotta.shared("all")) == set(affine) | set(statistics)
    assert rotta.state_dict()["memory.samples"].shape == (6, 3, 6, 6)
    for name, (mean, variance) in rotta.domain().items():
        assert torch.equal(mean, statistics[f"student.{name}.running_mean"])
        assert torch.equal(variance, statistics[f"student.{name}.running_var"])
    source = two_head_network().encoder[1]
    fresh = make_rotta()
    assert torch.equal(fresh.domain()["encoder.1"][0], source.running_mean)
    fresh.load_shared(rotta.shared("all"))
    x = images(9, seed=2)
    assert torch.equal(fresh.predict(x), rotta.predict(x))  # the teacher is what predicts


def test_samples_of_a_batch_are_predicted_before_any_is_learned_from() -> None:
    x, rotta = images(20), make_rotta()
    with torch.no_grad():
        want = torch.softmax(two_head_network()(x), 1)
    torch.testing.assert_close(rotta.predict(x), want)
    assert not torch.allclose(rotta.predict(x), want, atol=1e-4)


def test_a_failing_update_undoes_the_batch() -> None:
    calls = []

    def breaks(x: Tensor, generator: Generator) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no view")
        return noise(x, generator)

    rotta, x = make_rotta(augment=breaks), images(20)
    rotta.predict(x[:7])
    before = rotta.state_dict()
    with pytest.raises(RuntimeError, match="no view"):
        rotta.predict(x[7:])  # its second update fails
    assert same(rotta.state_dict(), before)
    assert rotta.report()["entropy"].shape == (7,)


def test_a_memory_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    rotta, other = make_rotta(), make_rotta(seed=4)
    rotta.predict(images(20))
    other.predict(images(20, seed=5))
    before = rotta.state_dict()
    with pytest.raises(ValueError, match="from 0 to 3"):
        rotta.load_state_dict({**other.state_dict(), "memory.labels": torch.tensor([9] * 6)})
    assert same(rotta.state_dict(), before)


def test_samples_of_another_kind_in_memory_are_refused_and_change_nothing() -> None:
    rotta, x = make_rotta(), images(20)
    rotta.predict(x)
    before = rotta.state_dict()
    samples = before["memory.samples"]
    for bad, words in ((samples.float(), "float32"), (samples.long(), "int64"), (samples.sum(), "as many")):
        with pytest.raises(ValueError, match=words):
            rotta.load_state_dict({**before, "memory.samples": bad})
        assert same(rotta.state_dict(), before)
    rotta.load_state_dict({**before, "memory.samples": samples[:, :1]})
    loaded = rotta.state_dict()
    with pytest.raises(ValueError, match=r"of shape \(1, 6, 6\), those of the batch are torch.float64 of shape"):
        rotta.predict(x)
    assert same(rotta.state_dict(), loaded)
