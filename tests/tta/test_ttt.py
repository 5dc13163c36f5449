from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from fedtta.models.two_head import TwoHead
from fedtta.tta.ttt import TTT, CropAndFlip, rotate, rotation_loss
from tests.tta.networks import images, noise, two_head_network, weights

OPTIONS: dict[str, Any] = {"views": 5, "lr": 0.3, "seed": 3}  # a large rate: the tuning must show


def network(dtype: torch.dtype = torch.float64) -> TwoHead:
    """With BatchNorm, a dropout that must stay off, and a rotation head."""
    model: Any = two_head_network(dtype)
    model.encoder.append(nn.Dropout(0.5))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model.rotation_head = nn.Linear(6, 4).to(dtype)
    return model.eval()


def reference(model: TwoHead, x: Tensor, ttt: TTT, steps: int, head: str) -> tuple[Tensor, Tensor, nn.Module]:
    """Sample by sample, view by view: torch.optim.SGD on one copy that is never put back."""
    tuned: Any = copy.deepcopy(model).eval()
    descent = torch.optim.SGD([*tuned.encoder.parameters(), *tuned.rotation_head.parameters()], lr=ttt.tuning.lr)
    rows, losses = [], []
    for position, sample in enumerate(x):
        for step in range(steps):
            generator = ttt.tuning.generator(position, step)
            views = ttt.tuning.augment(torch.stack([sample] * ttt.tuning.views), generator)
            loss = torch.zeros((), dtype=x.dtype)
            for view, turns in zip(views, torch.randint(4, (len(views),), generator=generator).tolist(), strict=True):
                for _ in range(turns):
                    view = view.flip(2).transpose(1, 2)  # the columns from the last to the first become rows
                p = torch.softmax(tuned.rotation_head(tuned.features(view[None]))[0], 0)
                loss = loss - p[turns].log() / len(views)
            losses.append(loss.detach())
            tuned.zero_grad()
            loss.backward()
            descent.step()
        z = tuned.features(sample[None])
        rows.append(torch.softmax((tuned.head if head == "global" else tuned.personal_head)(z), 1).detach())
    return torch.cat(rows), torch.stack(losses).view(len(x), steps), tuned


@pytest.mark.parametrize(("augment", "steps", "head"), [(None, 1, "global"), (noise, 2, "personal")])
def test_it_equals_the_reference_however_the_stream_is_cut(augment: Any, steps: int, head: Any) -> None:
    model, x = network(), images(8)
    before = weights(model)
    for size in (1, 7, 8):
        ttt = TTT(model, steps=steps, head=head, augment=augment, **OPTIONS)
        want, losses, tuned = reference(model, x, ttt, steps, head)
        got = torch.cat([ttt.predict(part) for part in x.split(size)])
        torch.testing.assert_close(got, want, atol=1e-10, rtol=0)
        torch.testing.assert_close(ttt.report()["loss"], losses, atol=1e-10, rtol=0)
        state = ttt.state_dict()
        for name, value in tuned.named_parameters():
            if f"weight.{name}" in state:
                torch.testing.assert_close(state[f"weight.{name}"], value.detach(), atol=1e-10, rtol=0)
    untuned = TTT(model, steps=0, head=head).predict(x)
    assert float((got - untuned).abs().max()) > 1e-3
    assert {name.split(".")[1] for name in state if "." in name} == {"encoder", "rotation_head"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.requires_grad and value.grad is None for value in model.parameters())


def test_rotation_by_hand() -> None:
    image = torch.tensor([[0.0, 1.0], [2.0, 3.0]]).expand(4, 1, 2, 2)
    got = rotate(image, torch.tensor([3, 0, 1, 2]))[:, 0].tolist()
    assert got == [[[2, 0], [3, 1]], [[0, 1], [2, 3]], [[1, 3], [0, 2]], [[3, 2], [1, 0]]]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(0, 5))
def test_turns_add_up_and_come_round(seed: int, n: int) -> None:
    generator = Generator().manual_seed(seed)
    x = torch.rand(n, 2, 3, 3, generator=generator)
    one, two = torch.randint(4, (2, n), generator=generator)
    assert torch.equal(rotate(rotate(x, one), two), rotate(x, (one + two) % 4))
    assert torch.equal(rotate(rotate(x, one), (4 - one) % 4), x)


def test_the_gradient_of_the_rotation_loss_is_that_of_finite_differences() -> None:
    model: Any = network()
    x = images(6)
    parameters = [model.encoder[1].weight, model.rotation_head.bias]
    loss = rotation_loss(model, x, Generator().manual_seed(1))
    for value, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        for i in range(len(value)):
            losses = []
            with torch.no_grad():
                for step in (1e-5, -2e-5, 1e-5):
                    value[i] += step
                    losses.append(float(rotation_loss(model, x, Generator().manual_seed(1))))
            assert float(gradient[i]) == pytest.approx((losses[0] - losses[1]) / 2e-5, abs=1e-8)


def test_a_head_that_knows_nothing_has_the_loss_ln_4() -> None:
    model: Any = network()
    nn.init.zeros_(model.rotation_head.weight)
    nn.init.zeros_(model.rotation_head.bias)
    assert rotation_loss(model, images(3), Generator()).item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("flip", [True, False])
def test_views_are_crops_of_the_padded_image_and_half_are_mirrored(flip: bool) -> None:
    x = 0.1 + 0.9 * torch.rand(400, 2, 3, 4, generator=Generator().manual_seed(0))
    views = CropAndFlip(padding=1, flip=flip)(x, Generator().manual_seed(1))
    mirrored, corners = 0, set()
    for image, view in zip(x, views, strict=True):
        padded = torch.zeros(2, 5, 6)
        padded[:, 1:4, 1:5] = image
        found = [
            (top, left, mirror)
            for top in range(3)
            for left in range(3)
            for mirror in (False, True)
            if torch.equal(view.flip(2) if mirror else view, padded[:, top : top + 3, left : left + 4])
        ]
        assert len(found) == 1
        mirrored += found[0][2]
        corners.add(found[0][:2])
    assert len(corners) == 9
    assert (150 < mirrored < 250) if flip else mirrored == 0
    grey = CropAndFlip(padding=1, flip=flip)(torch.ones(400, 1, 3, 4), Generator().manual_seed(1))
    assert torch.equal(grey[:, 0] > 0, views[:, 0] > 0)  # the same corners, whatever the values
    assert torch.equal(CropAndFlip(0, flip=False)(x, Generator()), x)


def test_bad_input_is_refused() -> None:
    x, generator = images(2), Generator()
    with pytest.raises(ValueError, match="may be trained"):
        TTT(network().requires_grad_(False))
    with pytest.raises(ValueError, match="square"):
        rotate(x[:, :, :4], torch.tensor([0, 1]))
    for turns in (torch.tensor([0, 4]), torch.tensor([0]), torch.tensor([0.0, 1.0])):
        with pytest.raises(ValueError, match="quarter_turns must be"):
            rotate(x, turns)
    with pytest.raises(ValueError, match="empty"):
        rotation_loss(network(), x[:0], generator)
    wide: Any = network()
    wide.rotation_head = nn.Linear(6, 5).double()
    with pytest.raises(ValueError, match="must give 4 numbers"):
        rotation_loss(wide, x, generator)
    with pytest.raises(ValueError, match="padding=-1"):
        CropAndFlip(-1)
