"""Contract of every data set, on small files in its published form; the real ones if they are available."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtta.client.resources import federation_of
from fedtta.data import DATASETS, load, load_natural
from fedtta.data.datasets.multi_domain import balanced_sample
from fedtta.settings import Settings
from tests.data.files import WRITERS
from tests.data.files import folders as colour_folders

FROM_FILES = [name for name in DATASETS if name != "digits"]
MULTI_DOMAIN = [name for name, one in DATASETS.items() if "domains" in one.options]
REAL = Path(os.environ.get("FEDTTA_DATA", "nowhere"))


@pytest.fixture(autouse=True)
def _no_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real" not in request.node.name:
        monkeypatch.delenv("FEDTTA_DATA", raising=False)


@pytest.mark.parametrize("name", DATASETS)
def test_images_have_the_size_asked_for_and_are_shared(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    whole, grey = load(name, root=tmp_path), load(name, root=tmp_path, image_size=16, channels=1)
    declared = DATASETS[name].classes
    assert (whole.shape, grey.shape) == ((3, 32, 32), (1, 16, 16))
    assert declared in (None, whole.num_classes)
    assert len(whole) > 0
    np.testing.assert_array_equal(whole.labels, grey.labels)
    assert load(name, root=tmp_path, seed=1) is load(name, root=tmp_path, seed=2) is whole
    part = load(name, root=tmp_path, fraction=0.5, seed=1)
    assert part is not load(name, root=tmp_path, fraction=0.5, seed=2)
    assert len(part) <= len(whole)
    assert not whole.pixels.flags.writeable


@pytest.mark.parametrize("name", DATASETS)
def test_declarations(name: str) -> None:
    declared = DATASETS[name]
    assert declared.description
    mean, std = declared.normalisation(1)
    assert mean[0] == pytest.approx(sum(declared.mean) / 3)
    assert std[0] == pytest.approx(sum(declared.std) / 3)
    assert declared.normalisation() == (declared.mean, declared.std)
    assert min(declared.std) > 0
    assert all(DATASETS[shift].present is not None for shift in declared.natural)
    there = ", ".join(declared.options) or "none"
    with pytest.raises(ValueError, match=f"unknown option 'sorce' of data set '{name}'; there are: {there}"):
        load(name, sorce="web")


def test_options_may_be_texts(tmp_path: Path) -> None:
    """A folder may be called 007, which is no number; a number of images is one."""
    colour_folders(tmp_path / "007" / "1", ("blue", "red"))
    assert load("folder", root=tmp_path, path="007", domain="1", image_size=8).classes == ("blue", "red")
    settings = Settings(dataset="folder", data_dir=str(tmp_path), dataset_options="path=007;domain=1", clients=1)
    assert federation_of(settings).images.classes == ("blue", "red")
    pacs = DATASETS["pacs"]
    given = {"per_domain": "20", "copies": "true", "domains": "1", "draw": 3}
    assert [pacs.typed(option, value) for option, value in given.items()] == [20, True, "1", 3]
    with pytest.raises(ValueError, match="per_domain='many': allowed is a whole number"):
        load("pacs", root=tmp_path, per_domain="many")
    with pytest.raises(ValueError, match="copies='1': allowed is true or false"):
        load("pacs", root=tmp_path, copies="1")


def test_options_are_those_of_the_loader() -> None:
    assert DATASETS["cifar10"].options == ("source", "part")
    assert DATASETS["pacs"].options == ("domains", "per_domain", "draw", "copies", "part")
    assert (DATASETS["imagenet32"].options, DATASETS["imagenet-a"].options) == (("natural",), ())
    assert not DATASETS["digits"].flip
    assert DATASETS["cifar10"].flip


@pytest.mark.parametrize("name", FROM_FILES)
def test_missing_data_are_named(name: str, tmp_path: Path) -> None:
    if name != "folder":  # an empty folder has no classes
        with pytest.raises(FileNotFoundError, match=str(tmp_path)):
            load(name, root=tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=r"root|FEDTTA_DATA"):
        load(name)


@pytest.mark.parametrize("name", [name for name in FROM_FILES if name != "imagenet32"])
def test_every_damaged_file_is_named(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    own = {"imagenet-a": "imagenet-a/n0[24]", "imagenet-r": "imagenet-r/n0[24]", "imagenet-v2": "imagenet-v2/[13]"}
    files = sorted(path for path in tmp_path.glob(f"{own.get(name, '**')}/*") if path.is_file())
    assert files
    for file in files:
        content = file.read_bytes()
        for damaged in (b"", b"nonsense", content[: len(content) // 3]):
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match=rf"{file.name} is damaged"):
                load(name, root=tmp_path)
        file.write_bytes(content)
    load(name, root=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "mnits"}, "unknown data set 'mnits'; there are: digits, cifar10, cifar100, cifar10.1, folder, npz"),
        ({"name": "cifar10", "source": "web"}, "there are: auto, packed, torchvision, folders, hub"),
        ({"name": "cifar10", "part": "val"}, "unknown part 'val'; there are: all, train, test"),
        ({"name": "cifar10.1", "version": "v5"}, "unknown version 'v5'; there are: v6, v4"),
        ({"name": "npz", "layout": "hwcn"}, "unknown layout 'hwcn'; there are: auto, nchw, nhwc"),
        ({"name": "digits", "channels": 2}, "channels must be 1 or 3"),
        ({"name": "digits", "image_size": 0}, "image_size=0"),
        ({"name": "digits", "fraction": 2.0}, "fraction=2.0"),
    ],
)
def test_bad_arguments_list_the_allowed_values(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(**arguments)


# Natural shifts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shift"), [(name, shift) for name, one in DATASETS.items() for shift in one.natural])
def test_natural_shifts_share_the_classes(name: str, shift: str, tmp_path: Path) -> None:
    assert load_natural(name, tmp_path, natural=shift) is None
    assert load_natural(name) is None
    WRITERS[shift](tmp_path)
    WRITERS[name](tmp_path)
    found = load_natural(name, tmp_path, image_size=16, channels=1, natural=shift)
    assert found is not None
    assert found.name == shift
    assert found.shape == (1, 16, 16)
    assert found.classes == load(name, tmp_path).classes
    usual = load_natural(name, tmp_path)
    assert usual is not None
    assert usual.name == DATASETS[name].natural[0]
    with pytest.raises(ValueError, match=rf"natural = 'digits': allowed with data set '{name}' are"):
        load_natural(name, tmp_path, natural="digits")


def test_data_sets_without_natural_shift(tmp_path: Path) -> None:
    assert load_natural("digits") is None
    assert load_natural("cifar100", tmp_path) is None


# Several domains ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MULTI_DOMAIN)
def test_domains_are_selected_and_sampled(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    whole = load(name, root=tmp_path, per_domain=0)
    assert whole.domain is not None
    assert np.array_equal(np.unique(whole.domain), np.arange(len(whole.domains)))
    assert (np.diff(whole.domain) >= 0).all()
    last = whole.domains[-1]
    alone = load(name, root=tmp_path, per_domain=3, domains=f" {last} ")
    assert (alone.name, alone.domains, len(alone)) == (name, (last,), 3)
    small = load(name, root=tmp_path, per_domain=3)
    assert small.domain is not None
    np.testing.assert_array_equal(small.pixels[small.domain == len(whole.domains) - 1], alone.pixels)
    draws = {load(name, root=tmp_path, per_domain=3, domains=last, draw=draw).pixels.tobytes() for draw in range(5)}
    assert len(draws) > 1


@pytest.mark.parametrize("name", MULTI_DOMAIN)
def test_bad_domains_and_samples(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{name}: .* not found; expected: {tmp_path}/"):
        load(name, root=tmp_path)
    with pytest.raises(ValueError, match=f"unknown domain 'oil' of {name}; there are: [a-z]"):
        load(name, root=tmp_path, domains="oil")
    WRITERS[name](tmp_path)
    for option, value in (("per_domain", -1), ("per_domain", 2.5), ("draw", -1)):
        with pytest.raises(ValueError, match=f"{option}={value} must be a non-negative integer"):
            load(name, root=tmp_path, **{option: value})


@given(st.lists(st.integers(0, 4), max_size=60), st.integers(0, 70), st.integers(0, 99))
def test_a_balanced_sample_is_as_even_as_possible(labels: list[int], count: int, seed: int) -> None:
    stock = np.array(labels, np.int64)
    drawn = balanced_sample(stock, count, np.random.default_rng(seed))
    assert len(drawn) == (min(count, len(labels)) or len(labels))
    assert (np.diff(drawn) > 0).all()
    got, there = np.bincount(stock[drawn], minlength=5), np.bincount(stock, minlength=5)
    # No class with samples left contributes fewer than another one, beyond the remainder of one.
    short = got < there
    assert not short.any() or got.max() - got[short].min() <= 1


# Real data ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "folder", "options", "counts"),
    [
        ("digit5", "digits", {"per_domain": 0, "domains": "mnist,usps"}, [9438, 9291]),
        ("office10", "office_caltech10", {"copies": True}, [958, 1123, 157, 295]),
        ("office10", "office_caltech10", {}, [933, 1122, 157, 295]),
        ("pacs", "pacs64", {"domains": "photo"}, [1670]),
    ],
)
def test_real_counts(name: str, folder: str, options: dict[str, Any], counts: list[int]) -> None:
    if not (REAL / folder).is_dir():
        pytest.skip("the data are not available")
    made = load(name, **options)
    assert made.domain is not None
    assert np.bincount(made.domain).tolist() == counts
    assert made.num_classes == DATASETS[name].classes


def test_real_cifar10() -> None:
    if not (REAL / "cifar10").is_dir():
        pytest.skip("the data are not available")
    made = load("cifar10")
    assert made.pixels.shape == (60_000, 3, 32, 32)
    assert np.bincount(made.labels).tolist() == [6000] * 10
    assert np.bincount(made.labels[:50_000]).tolist() == [5000] * 10
    train = made.pixels[:50_000]
    means = [train[:, channel].mean() / 255 for channel in range(3)]
    deviations = [train[:, channel].std() / 255 for channel in range(3)]
    np.testing.assert_allclose(means, DATASETS["cifar10"].mean, atol=5e-5)
    np.testing.assert_allclose(deviations, DATASETS["cifar10"].std, atol=5e-5)
