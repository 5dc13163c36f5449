"""A device with data of its own: all of them are one client's, fixed for a run, with or without labels."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtta.client.algorithms.training import DRAWN_AT_ONCE, TrainingSet, epoch, labelled
from fedtta.client.device import Device
from fedtta.client.node import Node, make_device, perform
from fedtta.client.own import _of_run, scan, settings_alone
from fedtta.client.state import DirectoryState, MemoryState
from fedtta.data import CropFlip, Images, LazyRows
from fedtta.messages.arrays import digest
from fedtta.messages.replies import Adapted, Evaluated, Identity, Summarized, Trained
from fedtta.messages.requests import (
    Adapt,
    AdapterRow,
    Evaluate,
    Identify,
    RefineRates,
    Summarize,
    Train,
    TrainingTask,
)
from fedtta.models import build
from fedtta.settings import Settings, SettingsError, parse_class_map, to_json
from tests.client.folders import CLASSES, OWN, SIZE, folder

TASK = TrainingTask("cross_entropy")
COUNTS = {"blue": 20, "green": 20, "red": 20}
BATCHNORM = OWN.replace(model_options="norm=batch")


@pytest.fixture(autouse=True)
def _new_process() -> Iterator[None]:
    """No scan of another test counts."""
    _of_run.cache_clear()
    yield
    _of_run.cache_clear()


class Box:
    """A device with a folder, its state on disk."""

    def __init__(self, path: Path, counts: dict[str, int] | None = None, settings: Settings = OWN, **node: Any) -> None:
        self.folder, self.state = path / "images", path / "state"
        if counts is not None:
            folder(self.folder, counts)
        self.settings = settings
        config = {"state-dir": str(self.state)}
        node = {"name": "site-a", "source": f"folder:{self.folder}", "settings": config, **node}
        self.node = Node(state=MemoryState(), **node)

    def about(self, run: str = "run1") -> dict[str, Any]:
        return {"settings": to_json(self.settings), "run": run}

    def ask(self, kind: Any, run: str = "run1", **fields: Any) -> Any:
        return perform(kind(**fields, **self.about(run)), self.node)

    def identity(self, run: str = "run1") -> Identity:
        return self.ask(Identify, run)

    def device(self, run: str = "run1") -> Device:
        return make_device(Identify(**self.about(run)), self.node)

    def trained(self, round: int = 1, objective: str = "cross_entropy") -> Trained:
        return self.ask(Train, round=round, task=TrainingTask(objective), arrays=arrays())


def arrays(norm: str | None = None) -> dict[str, np.ndarray]:
    model = build("cnn", len(CLASSES), image_size=SIZE, seed=5, norm=norm)
    return {name: value.numpy() for name, value in model.global_state().items()}


def test_all_images_are_this_clients(tmp_path: Path) -> None:
    box = Box(tmp_path, COUNTS)
    (box.folder / "red" / "broken.png").write_bytes(b"no image")
    identity = box.identity()
    assert sum(identity.sizes) == 60
    assert (identity.name, identity.own_data, identity.labelled) == ("site-a", True, True)
    assert (identity.samples, identity.skipped, identity.classes_present) == (61, 1, 3)
    assert identity.classes == list(CLASSES)
    assert any("1 of 61" in note for note in identity.notes)
    assert identity.shifts == ["original", "corrupted"]
    assert "mixture" in identity.note
    reply = box.trained()
    assert reply.num_examples == identity.sizes[0]


def test_settings_of_a_divided_data_set_play_no_part_and_a_note_says_so(tmp_path: Path) -> None:
    box = Box(tmp_path, COUNTS)
    plain, reply = box.identity(), box.trained()
    assert not any("partition" in note for note in plain.notes)
    box.settings = OWN.replace(partition="dirichlet", alpha=0.5, dataset="no such data set", fraction=0.1)
    told = box.identity()
    assert told.sizes == plain.sizes
    (note,) = set(told.notes) - set(plain.notes)
    for word in ("partition = dirichlet", "alpha = 0.5", "dataset = no such data set", "fraction = 0.1"):
        assert word in note
    again = box.trained()
    assert all(np.array_equal(reply.arrays[name], again.arrays[name]) for name in reply.arrays)


def test_the_augmentation_of_own_images_flips_and_their_normalization_is_half(tmp_path: Path) -> None:
    device = Box(tmp_path, COUNTS, OWN.replace(dataset="svhn")).device()  # a data set without flips
    data = TrainingSet.of_client(device.federation, 0, device.settings, torch.device("cpu"))
    assert data.augment is not None
    x = torch.rand(64, 3, SIZE, SIZE)
    x[..., SIZE // 2 :] = 0  # the right half is black: crops of a few pixels leave it dark, flips do not
    changed = data.augment(x, torch.Generator().manual_seed(0))
    assert (changed[..., SIZE - 3 :].mean((1, 2, 3)) > changed[..., :3].mean((1, 2, 3))).any()
    identity = Box(tmp_path).identity()
    assert (identity.mean, identity.std) == ([0.5] * 3, [0.5] * 3)


@pytest.mark.parametrize(
    ("normalization", "channels", "mean", "std"),
    [
        ("half", 1, [0.5], [0.5]),
        ("imagenet", 3, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ("0.1,0.2,0.3;0.4,0.5,0.6", 3, [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]),
        ("0.1;0.4", 3, [0.1] * 3, [0.4] * 3),
        ("0.25,0.5,0.75;0.25,0.5,0.75", 1, [0.5], [0.5]),  # of colour images
    ],
)
def test_the_normalization_is_that_of_the_run(
    tmp_path: Path, normalization: str, channels: int, mean: list[float], std: list[float]
) -> None:
    box = Box(tmp_path, COUNTS, OWN.replace(normalization=normalization, channels=channels))
    identity, device = box.identity(), box.device()
    assert (identity.mean, identity.std, identity.channels) == (mean, std, channels)
    assert device.federation.images.shape == (channels, SIZE, SIZE)
    first: Any = device.model.encoder[0]
    assert first.mean.flatten().tolist() == pytest.approx(mean)


@pytest.mark.parametrize("normalization", ["quarter", "0.5", "0.1,0.2;0.3,0.4", "0.5;0", "nan;1"])
def test_a_normalization_that_is_none_is_refused(tmp_path: Path, normalization: str) -> None:
    with pytest.raises(SettingsError, match="normalization = "):
        Box(tmp_path, COUNTS, OWN.replace(normalization=normalization)).identity()


def test_the_network_spec_has_preprocessing_and_class_names(tmp_path: Path) -> None:
    box = Box(tmp_path, COUNTS, OWN.replace(resize="pad", interpolation="bicubic"))
    box.trained()
    row = AdapterRow("none", "none")
    request = Evaluate(round=1, task=TASK, arrays=arrays(), rows=[row], shifts=[], **box.about())
    served = make_device(request, box.node).serve(request, row)
    assert served.spec["classes"] == list(CLASSES)
    assert served.spec["preprocessing"]["resize"] == "pad"
    assert served.spec["preprocessing"]["interpolation"] == "bicubic"


def test_a_data_set_that_is_divided_refuses_a_preprocessing_that_it_does_not_have() -> None:
    settings = Settings(resize="pad", clients=2, device="cpu")
    with pytest.raises(SettingsError, match="resize = 'pad'"):
        perform(Identify(settings=to_json(settings), run="r"), Node("0", MemoryState(), memory=MemoryState()))


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"classes": ""}, "classes = ''"), ({"split": "published"}, "split = 'published'")],
)
def test_a_run_that_does_not_fit_own_data_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        Box(tmp_path, COUNTS, OWN.replace(**changes)).identity()


def test_a_class_that_the_run_does_not_have_is_refused_by_name_unless_it_is_mapped(tmp_path: Path) -> None:
    counts = {"blue": 20, "rouge": 10}
    with pytest.raises(ValueError, match="rouge"):
        Box(tmp_path, counts).identity()
    box = Box(tmp_path, class_map=parse_class_map("rouge=red"))
    assert box.identity().classes_present == 2
    images = box.device().federation.images
    assert set(images.labels.tolist()) == {CLASSES.index("blue"), CLASSES.index("red")}


def test_without_own_data_a_name_that_no_client_has_is_refused() -> None:
    with pytest.raises(SettingsError, match="name = 'site-a': allowed are '0' to '2'"):
        perform(Identify(settings=to_json(OWN), run="r"), Node("site-a", MemoryState()))


def test_seeds_go_by_name(tmp_path: Path) -> None:
    box = Box(tmp_path, COUNTS)
    first, twin = box.trained(), Box(tmp_path).trained()
    other = Box(tmp_path, name="site-b").trained()
    assert all(np.array_equal(first.arrays[name], twin.arrays[name]) for name in first.arrays)
    assert any(not np.array_equal(first.arrays[name], other.arrays[name]) for name in first.arrays)


# The same data until the run ends -----------------------------------------------------------------------------------


def test_new_files_count_from_the_next_run_on_whatever_process_answers(tmp_path: Path) -> None:
    box = Box(tmp_path, COUNTS)
    before, reply = box.identity(), box.trained()
    folder(tmp_path / "new", {"blue": 9, "green": 9}, seed=9)
    for path in (tmp_path / "new").rglob("*.png"):  # their names come between those of the files before
        shutil.copy(path, box.folder / path.parent.name / f"010-{path.name}")
    _of_run.cache_clear()  # a new process
    assert box.identity().sizes == before.sizes
    again = box.trained()
    assert all(np.array_equal(reply.arrays[name], again.arrays[name]) for name in reply.arrays)
    assert sum(box.identity("run2").sizes) == sum(before.sizes) + 18


def test_data_that_disappear_during_a_run_are_an_error_that_says_so(tmp_path: Path) -> None:
    box = Box(tmp_path, COUNTS)
    box.identity()
    (box.folder / "red" / "003.png").unlink()
    _of_run.cache_clear()
    with pytest.raises(ValueError, match="1 of 60 samples that the run began with are gone"):
        box.identity()
    assert sum(box.identity("run2").sizes) == 59


def test_the_server_does_not_hear_of_the_entry_that_keeps_the_data(tmp_path: Path) -> None:
    box = Box(tmp_path, COUNTS)
    box.trained()
    assert box.identity().saved == {TASK.training: [1]}
    assert (box.state / "run1" / "site-a" / "own-data@0.safetensors").exists()


# Nothing needs all images at once -----------------------------------------------------------------------------------


def in_memory(device: Device) -> Device:
    """The same device, its images in memory."""
    images = device.federation.images
    pixels = np.ascontiguousarray(images.pixels[np.arange(len(images))])
    own = Images(images.name, pixels, images.labels, images.classes)
    return replace(device, federation=replace(device.federation, images=own))


def test_images_from_disk_train_and_evaluate_to_the_same_bits_as_images_in_memory(tmp_path: Path) -> None:
    rows = [AdapterRow("none", "none"), AdapterRow("knn", "knn_per"), AdapterRow("tent", "tent")]
    found = []
    for change in (lambda device: device, in_memory):
        box = Box(tmp_path, COUNTS, OWN.replace(augment=False, model_options="norm=batch"))
        shutil.rmtree(box.state, ignore_errors=True)
        _of_run.cache_clear()
        device = change(box.device())
        train = Train(round=1, task=TASK, arrays=arrays("batch"), **box.about())
        trained = device.train(train)
        wanted = ["label_prior", "confusion", "block_scores"]
        summarize = Summarize(round=2, task=TASK, arrays=trained.arrays, wanted=wanted, **box.about())
        known = device.summarize(summarize)
        shifts = ["original", "corrupted"]
        request = Evaluate(
            round=2, task=TASK, arrays=trained.arrays, rows=rows, shifts=shifts, statistics=None, **box.about()
        )
        evaluated = device.evaluate(request)
        refine = RefineRates(
            round=1, variant="all", network=digest(trained.arrays), arrays=trained.arrays, rates={}, **box.about()
        )
        refined = device.refine_rates(refine)
        results = [(one.label, one.shift, one.correct, one.total) for one in evaluated.results]
        found.append(({**trained.arrays, **known.statistics, **refined.rates}, results))
    (values, results), (expected, same) = found
    assert results == same
    assert values.keys() == expected.keys()
    assert all(np.array_equal(values[name], expected[name]) for name in values)


def test_only_batches_of_the_images_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(tmp_path, COUNTS, OWN.replace(batch_size=4, eval_batch_size=4, rates_batch_size=4))
    device = box.device()
    asked: list[int] = []
    kind = type(device.federation.images.pixels)
    inner = kind.__getitem__

    def counted(self: Any, index: Any) -> Any:
        found = inner(self, index)
        asked.append(len(found))
        return found

    monkeypatch.setattr(kind, "__getitem__", counted)
    rows = [AdapterRow("none", "none"), AdapterRow("knn", "knn_per")]
    box.trained()
    wanted = ["label_prior", "confusion"]
    box.ask(Summarize, round=2, task=TASK, arrays=arrays(), wanted=wanted)
    box.ask(RefineRates, round=1, variant="all", network=digest(arrays()), arrays=arrays(), rates={})
    box.ask(Evaluate, round=2, task=TASK, arrays=arrays(), rows=rows, shifts=["original", "corrupted", "shifted_ind"])
    assert sum(asked) > 300
    assert max(asked) <= 2 * 4  # `numpy.array_split` makes batches of up to twice the size


def test_an_epoch_of_images_in_memory_is_augmented_many_batches_at_once(tmp_path: Path) -> None:
    device = Box(tmp_path, COUNTS, OWN.replace(batch_size=2)).device()
    sizes: list[int] = []

    class Noting(CropFlip):
        def apply(self, x: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
            sizes.append(len(x))
            return x

    for one, expected in ((device, 2), (in_memory(device), 2 * DRAWN_AT_ONCE)):
        data = TrainingSet.of_client(one.federation, 0, one.settings, torch.device("cpu"))
        sizes.clear()
        list(epoch(replace(data, augment=Noting()), 2, torch.Generator().manual_seed(0)))
        assert max(sizes) == min(expected, len(data))
    x, _ = labelled(device.federation, np.arange(5), torch.device("cpu"))
    assert isinstance(x, LazyRows)
    assert x[torch.tensor([3, 1])].equal(device.federation.images.batch([3, 1]))


# Without labels -----------------------------------------------------------------------------------------------------


def test_a_device_without_labels_is_a_target_that_gets_the_model_and_is_never_measured(tmp_path: Path) -> None:
    box = Box(tmp_path, {"": 30})
    identity = box.identity()
    assert (identity.role, identity.labelled, identity.classes_present) == ("target", False, None)
    assert (identity.sizes, identity.shifts) == ([0, 0, 30], [])
    rows = [AdapterRow("none", "none"), AdapterRow("p", "none", base="personalised")]
    reply: Evaluated = box.ask(Evaluate, round=1, task=TASK, arrays=arrays(), rows=rows, shifts=[])
    assert (reply.results, reply.checked, reply.leaked) == ([], 0, 0)
    with pytest.raises(ValueError, match="site-a has no labels"):
        box.ask(Evaluate, round=1, task=TASK, arrays=arrays(), rows=rows, shifts=["original"])
    for refused in (box.trained, lambda: box.ask(Summarize, round=1, task=TASK, arrays=arrays())):
        with pytest.raises(ValueError, match="client site-a is a target"):
            refused()
    with pytest.raises(ValueError, match="role = 'both'"):
        Box(tmp_path, role="both").identity("run2")


def test_a_device_without_labels_serves_the_model_it_gets(tmp_path: Path) -> None:
    box = Box(tmp_path, {"": 30}, BATCHNORM)
    row = AdapterRow("tent", "tent")
    request = Evaluate(round=1, task=TASK, arrays=arrays("batch"), rows=[row], shifts=[], **box.about())
    device = make_device(request, box.node)
    device.evaluate(request)
    served = device.serve(request, row)
    images = device.federation.images
    probabilities = torch.softmax(served.network(images.batch(np.arange(30))), 1).detach().numpy()
    shares = np.bincount(probabilities.argmax(1), minlength=3) / 30
    assert served.baseline.shares.tolist() == shares.tolist()
    assert served.baseline.entropy > 0


@pytest.mark.parametrize(("counts", "total"), [({"": 11}, 0), (COUNTS, None)])
def test_test_time_rounds_go_over_the_devices_own_test_images(
    tmp_path: Path, counts: dict[str, int], total: int | None
) -> None:
    collaborating = BATCHNORM.replace(methods="tent", collaborations="fedavg", stream_batch=4, stream_size=4)
    box = Box(tmp_path, counts, collaborating)
    identity = box.identity()
    tests = identity.sizes[2]
    assert identity.corruptions == ["original"]
    assert identity.stream_rounds == -(-tests // 4)
    seen = []
    for round in range(1, identity.stream_rounds + 1):
        reply: Adapted = box.ask(
            Adapt, round=round, row=AdapterRow("tent", "tent"), cell="c", share="affine",
            network=digest(arrays("batch")),
            arrays=arrays("batch") if round == 1 else None, shared=None, send_normalization=False, send_start=False,
        )  # fmt: skip
        seen.append(reply.num_examples)
        assert reply.corruption == 0
        assert sum(reply.total) == (reply.num_examples if total is None else total)
        assert sum(reply.correct) <= sum(reply.total)
    assert sum(seen) == tests
    with pytest.raises(ValueError, match="round"):
        box.ask(
            Adapt, round=len(seen) + 1, row=AdapterRow("tent", "tent"), cell="c", share="affine",
            network=digest(arrays("batch")), arrays=None, shared=None, send_normalization=False, send_start=False,
        )  # fmt: skip


# Missing classes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [{"blue": 20, "red": 20}, {"green": 30}], ids=["one lacks", "two lack"])
@pytest.mark.parametrize("objective", ["cross_entropy", "balanced_softmax"])
def test_a_device_that_lacks_classes_trains_and_is_validated(
    tmp_path: Path, counts: dict[str, int], objective: str
) -> None:
    box = Box(tmp_path, counts)
    reply = box.trained(objective=objective)
    assert all(np.isfinite(value).all() for value in reply.arrays.values())
    assert reply.validation_total == box.identity().sizes[1]
    assert box.identity().classes_present == len(counts)
    lacking = ", ".join(name for name in CLASSES if name not in counts)
    assert any(f"no sample of {lacking}" in note for note in box.identity().notes)


def test_statistics_of_a_device_that_lacks_classes_are_zero_for_them(tmp_path: Path) -> None:
    box = Box(tmp_path, {"blue": 20, "red": 20})
    reply: Summarized = box.ask(
        Summarize, round=1, task=TASK, arrays=arrays(), wanted=["label_prior", "confusion", "block_scores"]
    )
    prior, confusion = reply.statistics["label_prior"], reply.statistics["confusion"]
    assert prior[CLASSES.index("green")] == 0
    assert prior.sum() == pytest.approx(1)
    assert confusion[:, CLASSES.index("green")].sum() == 0
    assert confusion.sum() == pytest.approx(1)


def test_every_method_predicts_where_classes_are_missing(tmp_path: Path) -> None:
    """Label-shift methods and balanced normalization too, whose statistics come from a device that lacks a class."""
    box = Box(tmp_path, {"blue": 20, "red": 20}, BATCHNORM)
    task = TrainingTask("balanced_softmax")
    state = box.ask(Train, round=1, task=task, arrays=arrays("batch")).arrays
    wanted = ["label_prior", "confusion", "block_scores"]
    known: Summarized = box.ask(Summarize, round=2, task=task, arrays=state, wanted=wanted)
    names = ["none", "em", "bbse", "bbn", "t3a", "fedthe", "btfl", "knn_per", "tent", "roid", "shot", "surgical"]
    rows = [AdapterRow(name, name) for name in names]
    reply: Evaluated = box.ask(
        Evaluate, round=2, task=task, arrays=state, rows=rows, shifts=["original"], statistics=known.statistics
    )
    assert [one.label for one in reply.results] == names
    assert all(0 <= one.correct <= one.total for one in reply.results)


def test_the_leak_check_goes_by_content(tmp_path: Path) -> None:
    box = Box(tmp_path, COUNTS)
    box.trained()
    device = box.device()
    test, train = device.federation.splits[0].test, device.federation.splits[0].train
    codes = device.federation.content
    assert codes is not None
    assert not device.federation.among(test, train).any()
    codes = codes.copy()
    codes[test[0]] = codes[train[0]]  # the same image in both splits
    leaky = replace(device, federation=replace(device.federation, content=codes))
    request = Evaluate(
        round=1, task=TASK, arrays=arrays(), rows=[AdapterRow("none", "none")], shifts=["original"], **box.about()
    )
    assert (device.evaluate(request).leaked, leaky.evaluate(request).leaked) == (0, 1)


def test_a_scan_outside_a_run_finds_the_same(tmp_path: Path) -> None:
    box = Box(tmp_path, COUNTS)
    settings = settings_alone(OWN.replace(state_dir=str(box.state)))
    data = scan(box.node.source, "site-a", None, {}, settings)
    assert [len(part) for part in (data.split.train, data.split.validation, data.split.test)] == box.identity().sizes
    assert (box.state / "data" / "site-a.json").exists()
    assert DirectoryState(box.state, "run1", "site-a").tags() == {"own-data": [0]}
