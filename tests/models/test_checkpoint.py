"""Files of arrays and models: bit-exact round trips, clear errors for damaged files, finiteness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save_file

from fedtta import models
from fedtta.models import checkpoint
from fedtta.models.arrays import all_finite, array_finite

SPEC = {"name": "cnn", "num_classes": 4, "image_size": 16, "mean": [0.4, 0.5, 0.6], "norm": "batch"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    models.save_model(path, models.build(**SPEC, seed=1), SPEC)
    return path


def test_a_file_without_personal_head_gives_the_same_one_each_time(saved: Path) -> None:
    first, second = models.load_model(saved)[0], models.load_model(saved)[0]
    assert torch.equal(first.personal_head.weight, second.personal_head.weight)


def test_the_personal_head_is_written_only_when_asked(saved: Path) -> None:
    assert not [name for name in models.load_arrays(saved)[0] if name.startswith("personal_head")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_type_survives(dtype: torch.dtype, tmp_path: Path) -> None:
    model = models.build(**SPEC, seed=1).to(dtype)
    models.save_model(tmp_path / "m", model, SPEC, personal=True)
    loaded, _ = models.load_model(tmp_path / "m")
    assert {value.dtype for value in loaded.global_state().values()} == {dtype}
    assert torch.equal(loaded.personal_head.weight, model.personal_head.weight)


def test_pretrained_weights_are_not_needed_again(tmp_path: Path) -> None:
    model = models.build("resnet18", 3, seed=0)
    spec = {"name": "resnet18", "num_classes": 3, "pretrained": "/nowhere/resnet18.pth"}
    models.save_model(tmp_path / "m", model, spec)
    loaded, read = models.load_model(tmp_path / "m")
    assert read == spec
    assert torch.equal(loaded.head.weight, model.head.weight)


def test_equal_models_are_equal_bytes(tmp_path: Path) -> None:
    """The library writes metadata in an order of its own for each file."""
    for number in range(20):
        models.save_model(tmp_path / str(number), models.build(**SPEC, seed=1), SPEC)
    contents = {path.read_bytes() for path in tmp_path.iterdir()}
    assert len(contents) == 1
    assert int.from_bytes(contents.pop()[:8], "little") % 8 == 0  # the arrays are aligned


DESCRIBED = {
    **SPEC,
    "classes": ["a", "b", "c", "d"],
    "preprocessing": models.Preprocessing(16, resize="crop", window=(0, 4095)).to_dict(),
}


def test_preprocessing_and_class_names_are_kept(tmp_path: Path) -> None:
    model = models.build(**DESCRIBED, seed=1)
    assert torch.equal(model.head.weight, models.build(**SPEC, seed=1).head.weight)
    models.save_model(tmp_path / "m", model, DESCRIBED)
    loaded, spec = models.load_model(tmp_path / "m")
    assert spec == DESCRIBED
    assert models.Preprocessing.from_dict(spec["preprocessing"]).window == (0.0, 4095.0)
    assert torch.equal(loaded.head.weight, model.head.weight)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"classes": ["a", "b", "c"]}, "must be 4 different names"),
        ({"classes": ["a", "b", "c", "c"]}, "must be 4 different names"),
        ({"classes": "abcd"}, "must be 4 different names"),
        ({"classes": ["a", "b", "c", 4]}, "must be 4 different names"),
        ({"preprocessing": {"image_size": 32}}, "makes 3 channels of 32 pixels, the network takes 3 of 16"),
        ({"preprocessing": {"image_size": 16, "channels": 1}}, "makes 1 channels of 16 pixels"),
        ({"preprocessing": {"image_size": 16, "resize": "squash"}}, "resize='squash'"),
        ({"preprocessing": "stretch"}, "must be a mapping"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        models.build(**{**DESCRIBED, **change})
    with pytest.raises(ValueError, match=words):
        models.save_model(tmp_path / "m", models.build(**SPEC), {**DESCRIBED, **change})


def test_every_truncation_is_refused_by_name(saved: Path) -> None:
    content = saved.read_bytes()
    for length in (0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 1):
        saved.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors: corrupt"):
            models.load_model(saved)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        models.load_model(tmp_path / "absent")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        models.load_arrays(tmp_path)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    models.save_arrays(path, {"a": np.arange(2.0), "b": np.array([True])}, {"round": "3"})
    content = path.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.safetensors"):
            models.load_arrays(path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_weights_are_refused_on_both_sides(value: float, saved: Path) -> None:
    before = saved.read_bytes()
    arrays, metadata = models.load_arrays(saved)
    arrays["head.bias"][1] = value
    model = models.build(**SPEC, seed=1)
    with torch.no_grad():
        model.head.bias[1] = value
    with pytest.raises(ValueError, match=r"model\.safetensors: head\.bias holds values that are not finite"):
        models.save_model(saved, model, SPEC)
    assert saved.read_bytes() == before
    models.save_arrays(saved, arrays, metadata, finite=False)
    with pytest.raises(ValueError, match=r"model\.safetensors: head\.bias holds values that are not finite"):
        models.load_model(saved)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "types", "personal name", "personal shape"])
def test_arrays_that_do_not_fit_are_refused(fault: str, saved: Path) -> None:
    arrays, metadata = models.load_arrays(saved)
    if fault == "missing":
        del arrays["head.bias"]
    elif fault == "unknown":
        arrays["head.bia"] = np.zeros(4, np.float32)
    elif fault == "shape":
        arrays["head.bias"] = np.zeros(5, np.float32)
    elif fault == "types":
        arrays["head.bias"] = np.zeros(4, np.float64)
    elif fault == "personal name":
        arrays["personal_head.bias"] = np.zeros(4, np.float32)
    else:
        arrays["personal_head.weight"] = np.zeros((5, 64), np.float32)
    models.save_arrays(saved, arrays, metadata)
    with pytest.raises(ValueError, match=r"model\.safetensors: .*(head\.bia|personal head|type)"):
        models.load_model(saved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "format 'other'"),
        ({"version": "2"}, "version '2'.*reads 1"),
        ({"spec": "{"}, "spec cannot be read"),
        ({"spec": "[]"}, "spec must be a mapping"),
        ({"spec": '{"name": "vgg", "num_classes": 4}'}, "unknown model 'vgg'"),
        ({"spec": '{"name": "cnn", "num_classes": 4, "widht": 1}'}, "no option 'widht'"),
        ({"spec": '{"name": "cnn", "num_classes": 4, "image_size": 8}'}, "too small"),
        ({"spec": '{"name": "cnn", "num_classes": 4, "image_size": 16}'}, "unknown.*norm1"),
    ],
)
def test_other_formats_and_specs_are_refused(change: dict[str, str], words: str, saved: Path) -> None:
    arrays, metadata = models.load_arrays(saved)
    models.save_arrays(saved, arrays, {**metadata, **change})
    with pytest.raises(ValueError, match=rf"model\.safetensors: .*{words}"):
        models.load_model(saved)


def test_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "foreign.safetensors"
    save_file({"a": np.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"foreign\.safetensors: .*checksum"):
        models.load_model(path)
    models.save_arrays(path, {"a": np.zeros(2)})
    with pytest.raises(ValueError, match="format None is not 'fedtta-model'"):
        models.load_model(path)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"name": "cnn"}, "'num_classes'"),
        ({"name": "cnn", "num_classes": 5, "image_size": 16}, "num_classes=5, the model has 4"),
        ({"name": "cnn", "num_classes": 4, "colour": True}, "no option 'colour'"),
    ],
)
def test_a_wrong_spec_is_refused_when_saving(spec: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        models.save_model(tmp_path / "m", models.build(**SPEC, seed=1), spec)
    assert list(tmp_path.iterdir()) == []


def test_bfloat16_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bfloat16; there are: float16, float32, float64"):
        models.save_model(tmp_path / "m", models.build(**SPEC, seed=1).bfloat16(), SPEC)


def test_the_file_says_what_it_is(saved: Path) -> None:
    _, metadata = models.load_arrays(saved)
    assert metadata["format"] == checkpoint.FORMAT == "fedtta-model"
    assert metadata["version"] == "1"


def test_a_failed_write_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        models.save_arrays(saved, {"a": np.zeros(3)})
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == ["model.safetensors"]


def test_bad_arrays_and_metadata_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for value, kind in ((np.array(["x"]), "<U1"), (np.array([1j]), "complex128"), ([None], "object")):
        with pytest.raises(ValueError, match=f"v has type {kind}"):
            models.save_arrays(path, {"v": value})
    for metadata in ({"round": 3}, {"checksum": "0"}):
        with pytest.raises(ValueError, match="metadata"):
            models.save_arrays(path, {}, metadata)  # type: ignore[arg-type]
    assert not path.exists()


def test_layout_and_byte_order_do_not_matter(tmp_path: Path) -> None:
    base = np.arange(12.0).reshape(3, 4)
    given_arrays = {"t": base.T, "s": base[::2, ::-1], "big": base.astype(">f4"), "zero": np.float64(2.5)}
    models.save_arrays(tmp_path / "a", given_arrays)
    read, metadata = models.load_arrays(tmp_path / "a")
    assert metadata == {}
    for name, value in given_arrays.items():
        assert np.array_equal(read[name], value)
        assert read[name].shape == np.shape(value)


DTYPES = st.sampled_from(["bool", "int8", "int64", "uint8", "uint32", "float16", "float32", "float64"])
ARRAYS = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))),
    max_size=4,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrays=ARRAYS, metadata=st.dictionaries(st.text("abcä€ \n", max_size=5), st.text("xyz\"'{", max_size=9)))
def test_any_arrays_come_back_bit_by_bit(
    arrays: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str], tmp_path: Path
) -> None:
    models.save_arrays(tmp_path / "a", arrays, metadata, finite=False)
    read, notes = models.load_arrays(tmp_path / "a", finite=False)
    assert notes == metadata
    assert set(read) == set(arrays)
    for name, value in arrays.items():
        assert (read[name].dtype, read[name].shape) == (value.dtype, value.shape)
        assert read[name].tobytes() == value.tobytes()


# Finiteness ---------------------------------------------------------------------------------------------------------

LARGE = float(np.finfo(np.float32).max)
numbers = st.one_of(st.sampled_from([0.0, LARGE, -LARGE, np.inf, -np.inf, np.nan]), st.floats(width=32))


@given(st.lists(st.lists(numbers, max_size=5), max_size=3), st.sampled_from([torch.float32, torch.float64]))
def test_it_is_what_looking_at_every_number_says(parts: list[list[float]], dtype: torch.dtype) -> None:
    expected = all(np.isfinite(part).all() for part in parts)
    assert all_finite([torch.tensor(part, dtype=dtype) for part in parts]) == expected
    for part in parts:
        for kind in (np.float32, np.float64):
            assert array_finite(np.array(part, dtype=kind)) == np.isfinite(part).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_other_types(dtype: torch.dtype) -> None:
    values = torch.tensor([60000, 60000, 3]).to(dtype)
    assert all_finite([values, torch.zeros(0)])
    assert array_finite(np.array([60000, 60000], np.float16))
    if dtype.is_floating_point:
        assert not all_finite([torch.zeros(2), values / 0])


def test_weights_that_need_a_gradient() -> None:
    value = torch.nn.Parameter(torch.tensor([1.0, float("nan")]))
    assert not all_finite([value])
    assert all_finite([])
