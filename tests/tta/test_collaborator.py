"""The base class of adapters that share, with a small fake; methods that normalise by batch statistics."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtta import tta
from fedtta.tta.collaborator import (
    SHARES,
    Collaborator,
    affine_names,
    batchnorm_layers,
    replace_batchnorms,
    shared_parameters,
)
from tests.tta.networks import conv_network, images, mlp_network, noise, two_head_network, vectors

METHODS: dict[str, dict[str, Any]] = {
    "bn_adapt": {},
    "tent": {"lr": 0.05, "steps": 2},
    "cotta": {"lr": 0.05, "views": 3, "augment": noise, "restore": 0.2, "momentum_teacher": 0.9},
}


class Fake(Collaborator):
    """Trains two numbers, keeps one mean and one variance."""

    def __init__(self, proximal: float = 0.0) -> None:
        super().__init__(nn.Linear(2, 2), proximal=proximal)
        self.gamma = torch.tensor([1.0, 2.0], requires_grad=True)
        self.mean, self.variance = torch.zeros(1), torch.ones(1)
        self.receptions = 0
        self._anchor_here()

    def trained(self) -> dict[str, Tensor]:
        return {"gamma": self.gamma}

    def normalisation(self) -> dict[str, Tensor]:
        return {"bn.running_mean": self.mean, "bn.running_var": self.variance}

    def domain(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {"bn": (self.mean, self.variance)}

    def _received(self) -> None:
        self.receptions += 1

    def _predict(self, x: Tensor) -> Tensor:
        return torch.softmax(self.model(x), 1)


def make(name: str, network: nn.Module, **options: Any) -> Any:
    return tta.create(name, network, **{**METHODS[name], **options})


@pytest.fixture(params=list(METHODS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_what_each_share_names() -> None:
    fake = Fake()
    assert list(fake.shared("affine")) == ["gamma"]
    assert list(fake.shared("statistics")) == ["bn.running_mean", "bn.running_var"]
    assert list(fake.shared("all")) == ["gamma", "bn.running_mean", "bn.running_var"]
    with pytest.raises(ValueError, match=r"'some'; there are: affine, statistics, all"):
        fake.shared("some")  # type: ignore[arg-type]


def test_shared_arrays_are_copies_without_gradients() -> None:
    fake = Fake()
    shared = fake.shared("all")
    shared["gamma"] += 1
    assert fake.gamma.tolist() == [1.0, 2.0]
    assert not shared["gamma"].requires_grad


@pytest.mark.parametrize("share", SHARES)
def test_what_is_received_is_taken_over_and_the_rest_kept(share: Any) -> None:
    fake = Fake()
    before = fake.shared("all")
    mixture = {name: value + 1 for name, value in fake.shared(share).items()}
    fake.load_shared(mixture)
    after = fake.shared("all")
    assert all(torch.equal(after[name], mixture.get(name, value)) for name, value in before.items())
    assert fake.gamma.requires_grad
    assert fake.receptions == 1


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"beta": torch.zeros(2)}, "names of no share"),
        ({"gamma": torch.zeros(2), "bn.running_mean": torch.zeros(1)}, "names of no share"),
        ({"gamma": torch.zeros(3)}, r"gamma: shape \(3,\) does not fit \(2,\)"),
        ({"gamma": torch.tensor([0.0, float("nan")])}, "gamma holds values that are not finite"),
        ({"bn.running_mean": -torch.ones(1), "bn.running_var": -torch.ones(1)}, "running_var holds negative variances"),
    ],
)
def test_bad_arrays_are_refused_and_nothing_is_loaded(arrays: dict[str, Tensor], message: str) -> None:
    fake = Fake()
    before = fake.shared("all")
    with pytest.raises(ValueError, match=message):
        fake.load_shared(arrays)
    assert all(torch.equal(fake.shared("all")[name], value) for name, value in before.items())
    assert fake.receptions == 0


class Classes(Fake):
    """Keeps the variance of a class."""

    def normalisation(self) -> dict[str, Tensor]:
        return {"class_variance": self.variance}


@pytest.mark.parametrize("kind", [Fake, Classes])
def test_a_variance_may_be_zero_and_not_below(kind: type[Fake]) -> None:
    fake = kind()
    arrays = {name: 0 * value for name, value in fake.shared("statistics").items()}
    fake.load_shared(arrays)
    assert fake.variance.tolist() == [0.0]
    with pytest.raises(ValueError, match="holds negative variances"):
        fake.load_shared({name: value - 1e-6 for name, value in arrays.items()})
    assert fake.variance.tolist() == [0.0]


def test_the_pull_by_hand() -> None:
    """μ = 0.5, θ - θ_received = (3, -1): (0.5/2)(9 + 1) = 2.5, gradient 0.5 (3, -1)."""
    fake = Fake(proximal=0.5)
    with torch.no_grad():
        fake.gamma += torch.tensor([3.0, -1.0])
    pull: Any = fake._pull()
    assert float(pull.detach()) == 2.5
    pull.backward()
    assert fake.gamma.grad is not None
    assert fake.gamma.grad.tolist() == [1.5, -0.5]
    assert fake._anchor_state()["received.gamma"].tolist() == [1.0, 2.0]
    fake.load_shared(fake.shared("affine"))
    pull = fake._pull()
    assert float(pull.detach()) == 0.0
    plain = Fake()
    assert plain._pull() == 0.0
    assert plain._anchor_state() == {}


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_bad_proximal_strength_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=f"proximal={value}"):
        Fake(proximal=value)


def test_batchnorm_layers_and_shared_parameters() -> None:
    network: Any = two_head_network()
    network.encoder[3].weight.requires_grad_(False)
    network.rotation_head = nn.Linear(6, 4)
    assert list(batchnorm_layers(network)) == ["encoder.1", "encoder.4"]
    want = {name for name in two_head_network().state_dict() if name.endswith(("weight", "bias"))}
    assert set(shared_parameters(network)) == want - {"encoder.3.weight", "personal_head.weight"}
    with pytest.raises(ValueError, match="Linear has no BatchNorm layer"):
        batchnorm_layers(nn.Linear(1, 1))


def test_every_place_of_a_batchnorm_is_replaced_and_the_network_may_be_one() -> None:
    norm = nn.BatchNorm1d(3)
    network, new = replace_batchnorms(norm, lambda layer: nn.Linear(layer.num_features, 3))
    assert new == {"": network}
    assert isinstance(network, nn.Linear)
    twice = nn.Sequential(norm, nn.ReLU(), nn.Sequential(norm), nn.BatchNorm1d(3))
    network, new = replace_batchnorms(twice, lambda layer: nn.Linear(layer.num_features, 3))
    assert network is twice
    assert list(new) == ["0", "3"]
    assert twice[0] is twice[2][0] is new["0"]
    assert twice[3] is new["3"]


def test_affine_names() -> None:
    assert affine_names(nn.BatchNorm1d(2)) == ["weight", "bias"]
    network = nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm1d(2), nn.BatchNorm2d(2, affine=False), nn.Linear(2, 2))
    network[0].bias.requires_grad_(False)
    assert affine_names(network) == ["0.weight", "1.weight", "1.bias"]
    assert affine_names(network, layers="batchnorm2d") == ["0.weight"]
    network[0].requires_grad_(False)
    assert affine_names(network, layers="batchnorm2d", required=False) == []
    with pytest.raises(ValueError, match="no BatchNorm2d layer of Sequential has weights that may be trained"):
        affine_names(network, layers="batchnorm2d")
    with pytest.raises(ValueError, match="1 keeps no running statistics"):
        batchnorm_layers(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(2, track_running_stats=False)))


# From here on: what holds for every method that normalises by batch statistics.


def test_a_change_of_the_network_given_does_not_reach_the_adapter(name: str) -> None:
    network, x = conv_network(), images(6)
    adapter = make(name, network)
    with torch.no_grad():
        for value in network.state_dict().values():
            value.zero_()
    assert torch.equal(adapter.predict(x), make(name, conv_network()).predict(x))


@pytest.mark.parametrize("kind", ["images", "vectors"])
def test_one_sample_at_a_time_stays_finite(name: str, kind: str) -> None:
    network, x = (conv_network(), images(5)) if kind == "images" else (mlp_network(), vectors(5))
    adapter = make(name, network)
    rows = torch.cat([adapter.predict(part) for part in x.split(1)])
    assert rows.shape == (5, 4)
    assert bool(torch.isfinite(rows).all())


def test_options_come_as_text_too(name: str) -> None:
    texts = {
        "bn_adapt": {"prior": "16"},
        "tent": {"optimizer": "sgd", "lr": "0.01", "steps": "2", "momentum": "0"},
        "cotta": {"restore": "0.1", "views": "2", "average": "probabilities", "augment": "none", "seed": "3"},
    }[name]
    options = tta.parse_options(name, {**texts, "proximal": "0.5"})
    adapter = tta.create(name, conv_network(torch.float32), **options)
    rows = adapter.predict(images(6, dtype=torch.float32))  # CoTTA's own views
    torch.testing.assert_close(rows.sum(1), torch.ones(6))
    with pytest.raises(ValueError, match="proximal"):
        tta.parse_options(name, {"proximal": "much"})


def test_dropout_and_other_layers_stay_in_evaluation_mode(name: str) -> None:
    network = nn.Sequential(nn.Dropout(0.5), mlp_network())
    x = vectors(6)
    assert torch.equal(make(name, network).predict(x), make(name, mlp_network()).predict(x))


def test_adapters_do_not_disturb_each_other(name: str) -> None:
    """Two clients on copies of one network, their batches taken in turn."""
    network, x, y = conv_network(), images(12, seed=2), images(12, seed=3)
    one, two = make(name, network), make(name, network)
    alone = make(name, copy.deepcopy(network))
    for a, b in zip(x.split(6), y.split(6), strict=True):
        rows = one.predict(a)
        two.predict(b)
        assert torch.equal(alone.predict(a), rows)
