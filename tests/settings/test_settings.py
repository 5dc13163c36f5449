"""The schema: every way in, every way to be refused."""

import argparse
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtta.settings import (
    Settings,
    SettingsError,
    add_arguments,
    assignments,
    from_arguments,
    from_config,
    from_toml,
    to_toml,
    words,
)


def parse(*words: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(words))


def test_defaults_are_valid_and_flat_keys_have_hyphens() -> None:
    flat = Settings().flat()
    assert flat["learning-rate"] == Settings().learning_rate
    assert not any("_" in key for key in flat)
    assert from_config(flat) == Settings()


@given(
    rounds=st.integers(0, 1000), rate=st.floats(1e-6, 10), augment=st.booleans(), name=st.text("abc\"'\\ é", max_size=9)
)
def test_toml_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rounds: int, rate: float, augment: bool, name: str
) -> None:
    settings = Settings(rounds=rounds, learning_rate=rate, augment=augment, model_options=name)
    path = tmp_path_factory.mktemp("toml") / "settings.toml"
    path.write_text(to_toml(settings), encoding="utf-8")
    assert from_config(from_toml(path)) == settings


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"rounds": "3"}, ["rounds", "'3'", "int"]),
        ({"rounds": True}, ["rounds", "True", "int"]),
        ({"rounds": 2.0}, ["rounds", "2.0", "int"]),
        ({"rounds": -1}, ["rounds", "-1", "0"]),
        ({"augment": 1}, ["augment", "1", "bool"]),
        ({"alpha": 0}, ["alpha", "0.0", "more than 0"]),
        ({"alpha": float("nan")}, ["alpha", "nan", "finite"]),
        ({"alpha": 10**400}, ["alpha", "finite"]),
        ({"severity": 6}, ["severity", "6", "at most 5"]),
        ({"optimizer": "sdg"}, ["optimizer", "'sdg'", "sgd, adam"]),
        ({"device": "gpu"}, ["device", "'gpu'", "auto, cpu, cuda"]),
        ({"device": "cuda:²"}, ["device", "'cuda:²'", "cuda:<index>"]),
        ({"momentum": 0.9, "optimizer": "adam"}, ["momentum", "0.9", "sgd"]),
        ({"leave-one-out": True, "statistics-weighting": "examples"}, ["leave-one-out", "uniform"]),
        ({"leave-one-out": True, "clients": 1}, ["leave-one-out = True", "clients = 2 or more"]),
        ({"clients": 3, "min-replies": 4}, ["min-replies", "4", "at most clients = 3"]),
        ({"clients": 3, "max-clients": 4, "min-replies": 5}, ["min-replies", "5", "at most max-clients = 4"]),
        ({"split": "twice"}, ["split", "'twice'", "once, published"]),
        ({"split": "published", "partition": "step"}, ["partition", "'step'", "'equal' or 'dirichlet' or 'iid'"]),
        ({"split": "published", "partition": "domain"}, ["partition", "'domain'", "split = 'published'"]),
        ({"split": "published", "target-fraction": 0.2}, ["target-fraction", "0.2", "split = 'published' is 0.0"]),
        ({"split": "published", "target-domain": "ink"}, ["target-domain", "'ink'", "split = 'published' is ''"]),
        ({"split": "published", "unseen-domain": "ink"}, ["unseen-domain", "'ink'", "split = 'published' is ''"]),
        ({"split": "published", "collaborations": "none"}, ["collaborations", "'none'", "split = 'published' is ''"]),
        ({"split": "published", "fraction-train": 0.5}, ["fraction-train", "0.5", "split = 'published' is 1.0"]),
        ({"shifts": "original, Unseen_Domain"}, ["shifts", "unseen_domain", "unseen-domain = '<domain>'"]),
        ({"run-name": "../x"}, ["run-name", "'../x'", "folder name"]),
        ({"run-name": "ü" * 101}, ["run-name", "folder name", "200 bytes"]),
        ({"run-name": "a\0b"}, ["run-name", "'a\\x00b'", "folder name"]),
        ({"metods": "btfl"}, ["metods", "did you mean methods?", "learning-rate"]),
        ({"learning_rate": 0.1}, ["learning_rate", "did you mean learning-rate?"]),
    ],
)
def test_refusals_name_key_value_and_what_is_allowed(config: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        from_config(config)
    for part in parts:
        assert part in str(caught.value)


def test_an_integer_is_a_fine_float_and_own_keys_can_be_ignored() -> None:
    assert from_config({"alpha": 1, "server-round": 4}, ignore=["server-round"]).alpha == 1.0


def test_command_line_wins_over_file(tmp_path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('rounds = 7\ndataset = "cifar10"\n')
    settings = parse("--settings", str(path), "--rounds", "3", "--augment", "false", "--alpha", "1e-1")
    assert (settings.rounds, settings.dataset, settings.augment, settings.alpha) == (3, "cifar10", False, 0.1)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--rounds", "x"], "rounds = 'x'"),
        (["--augment", "maybe"], "augment = 'maybe'"),
        (["--alpha", ""], "alpha = ''"),
    ],
)
def test_bad_words_on_the_command_line(words: list[str], part: str) -> None:
    with pytest.raises(SettingsError, match=part):
        parse(*words)


def test_bad_files_are_named(tmp_path) -> None:
    contents = {
        "broken.toml": b"rounds = = 3", "table.toml": b"[data]\nrounds = 3", "latin.toml": b'dataset = "\xe4"',
        "deep.toml": b"rounds = " + 9999 * b"[", "long.toml": b"rounds = " + 9999 * b"9",
    }  # fmt: skip
    for name, content in contents.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(SettingsError, match=name):
            from_toml(path)
    with pytest.raises(SettingsError, match=r"missing\.toml"):
        from_toml(tmp_path / "missing.toml")


def test_a_file_of_a_windows_editor_is_read(tmp_path) -> None:
    path = tmp_path / "s.toml"
    path.write_bytes(b"\xef\xbb\xbfrounds = 7\r\nseed = 2\r\n")
    assert from_toml(path) == {"rounds": 7, "seed": 2}


def test_every_setting_has_help() -> None:
    assert all(len(field.metadata["help"]) > 5 for field in dataclasses.fields(Settings))


def test_assignments() -> None:
    parsed = assignments("width=4; norm=batch;bias=false; lr=1e-2", "model-options")
    assert parsed == {"width": 4, "norm": "batch", "bias": False, "lr": 0.01}
    assert type(parsed["width"]) is int
    assert words("path=007; draw=1_0", "dataset-options") == {"path": "007", "draw": "1_0"}
    assert assignments("", "x") == {}
    for bad in ("width", "width=", "=4", "a=1;a=2"):
        with pytest.raises(SettingsError, match="model-options"):
            assignments(bad, "model-options")
