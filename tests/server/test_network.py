"""The network that a run starts from, and what a model file says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtta.models import build, save_model
from fedtta.server.members import FederationInfo
from fedtta.server.network import initial_model, model_spec, with_stated_normalization
from fedtta.settings import Settings, SettingsError

INFO = FederationInfo(["a", "b"], 3, [0.5] * 3, [0.5] * 3, ["original"], "", [[1, 1, 1]])


def test_bad_model_options_and_init_files_are_settings_errors(tmp_path: Path) -> None:
    settings = Settings(model_options="widht=3")
    with pytest.raises(SettingsError, match="widht"):
        initial_model(settings, model_spec(settings, INFO))
    with pytest.raises(SettingsError, match="window='9,1'"):
        model_spec(Settings(window="9,1"), INFO)
    spec = {**model_spec(Settings(), INFO), "classes": ["b", "a"]}
    save_model(tmp_path / "turned.safetensors", build(**spec), spec)
    with pytest.raises(SettingsError, match=r"turned.* its classes are b, a; the run has the same in another order"):
        initial_model(Settings(init=str(tmp_path / "turned.safetensors")), model_spec(Settings(), INFO))
    path = tmp_path / "cut.safetensors"
    path.write_bytes(b"half a file")
    with pytest.raises(SettingsError, match=r"cut\.safetensors"):
        initial_model(Settings(init=str(path)), model_spec(Settings(), INFO))


def test_a_note_tells_that_the_network_was_trained_on_other_images(tmp_path: Path) -> None:
    settings = Settings(model="resnet20-bn", model_options="depth=8;width=4")
    spec = model_spec(settings, INFO)
    file = tmp_path / "model.safetensors"
    for stated, words in (
        (spec, ""),
        ({**spec, "classes": ["c", "d"], "mean": [0.5, 0.5, 0.5]}, ""),
        ({**spec, "preprocessing": {**spec["preprocessing"], "resize": "pad", "window": [0, 9]}},
         "resize = 'pad', not 'stretch'; window = [0, 9], not None"),
    ):  # fmt: skip
        save_model(file, build(**stated), stated)
        expected = (f" was trained with {words}",) if words else ()
        initial = initial_model(settings.replace(init=str(file)), spec)
        assert initial.notes == tuple(f"init = '{file}'{one}" for one in expected)
        pretrained = initial_model(settings, {**spec, "pretrained": str(file)})
        assert pretrained.notes == tuple(f"pretrained = '{file}'{one}" for one in expected)


def test_normalization_auto_is_what_a_model_file_says(tmp_path: Path) -> None:
    file, settings = tmp_path / "m.safetensors", Settings(model="resnet20-bn", model_options="depth=8;width=4")
    plain = settings.replace(init=str(file))
    spec = {**model_spec(plain, INFO), "mean": [0.25, 0.5, 0.5], "std": 0.125}
    save_model(file, build(**spec), spec)
    text = "0.25,0.5,0.5;0.125,0.125,0.125"
    assert with_stated_normalization(plain) == plain.replace(normalization=text)
    pretrained = settings.replace(model_options=f"depth=8;width=4;pretrained={file}")
    assert with_stated_normalization(pretrained) == pretrained.replace(normalization=text)
    for other in (plain.replace(normalization="half"), pretrained.replace(normalization="half"), settings):
        assert with_stated_normalization(other) == other
    (note,) = initial_model(pretrained, model_spec(pretrained, INFO)).notes
    assert f"was trained with normalization = '{text}', not '0.5,0.5,0.5;0.5,0.5,0.5'" in note
    del spec["mean"], spec["std"]
    save_model(file, build(**spec), spec)
    assert with_stated_normalization(plain) == plain  # it does not say
    file.write_bytes(b"half a file")
    with pytest.raises(SettingsError, match=r"init = .*m\.safetensors"):
        with_stated_normalization(plain)
    with pytest.raises(SettingsError, match=r"model = 'resnet20-bn': .*m\.safetensors: cannot be read as weights"):
        with_stated_normalization(pretrained)
