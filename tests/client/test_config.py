"""What a device's TOML file may say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedtta.client.config import AgentConfig
from fedtta.settings import SettingsError

LEAST = 'name = "site-a"\nstate-dir = "state"\n'
TLS = 'certificate = "tls/server.pem"\nkey = "tls/server.key"\nclient-ca = "/etc/ca.pem"\n'


def read(folder: Path, text: str = "") -> AgentConfig:
    (folder / "device.toml").write_text(LEAST + text)
    return AgentConfig.from_toml(folder / "device.toml")


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    config = read(tmp_path, 'data-dir = "data"\nlisten = "unix:a.sock"\nrelay = "unix:/run/r.sock"\n')
    assert config.state_folder == tmp_path / "state"
    assert config.data_dir == str(tmp_path / "data")
    assert (config.listen_address, config.relay_address) == (f"unix:{tmp_path}/a.sock", "unix:/run/r.sock")


def test_sockets_are_in_the_state_directory_by_default(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.listen_address == f"unix:{tmp_path}/state/agent.sock"
    assert config.relay_address == f"unix:{tmp_path}/state/relay.sock"


def test_tcp_has_certificates(tmp_path: Path) -> None:
    config = read(tmp_path, f'listen = "0.0.0.0:7000"\n{TLS}')
    assert config.certificate == str(tmp_path / "tls/server.pem")
    assert config.client_ca == "/etc/ca.pem"


@pytest.mark.parametrize("address", ["127.0.0.1:9464", "[::1]:9464", "localhost:0"])
def test_metrics_are_local_without_certificates(tmp_path: Path, address: str) -> None:
    assert read(tmp_path).metrics == ""
    assert read(tmp_path, f'metrics = "{address}"').metrics == address
    assert read(tmp_path, f'metrics = "0.0.0.0:9464"\n{TLS}').listen_address.startswith("unix:")
    assert read(tmp_path, f'metrics = "{address}"\nlisten = "0.0.0.0:1"\n{TLS}').metrics == address


def test_an_adapter_has_typed_options(tmp_path: Path) -> None:
    config = read(tmp_path, 'adapter = "fedthe[beta=1; objective=em]"')
    assert (config.adapter_name, config.adapter_options) == ("fedthe", {"beta": 1.0, "objective": "em"})
    assert read(tmp_path, 'adapter = "t3a"').adapter_options == {}
    assert read(tmp_path, 'adapter = "surgical[block=50]"').adapter_options == {"block": 50}  # of a large network


def test_the_guard_gets_its_numbers(tmp_path: Path) -> None:
    assert read(tmp_path, "guard-window = 64\nguard-margin = 0.1").limits.window == 64


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gaurd = false", "'gaurd' (did you mean guard?)"),
        ("[guard]\nwindow = 3", "table [guard]"),
        ("guard = 1", "guard = 1: allowed is a value of type bool"),
        ("guard-window = 2", "guard-window = 2: allowed is 8 or more"),
        ("deadline = 0", "deadline = 0.0: allowed is more than 0"),
        ("save-every-seconds = 1e10", "save-every-seconds = 10000000000.0: allowed is"),
        ("deadline = nan", "deadline = nan"),
        ("max-skipped = -0.5", "max-skipped = -0.5: allowed are -1 and 0 to 1"),
        ('role = "teacher"', "role = 'teacher': allowed are , both, source, target"),
        ('base = "own"', "base = 'own': allowed are global, personalised"),
        ('device = "gpu"', "device = 'gpu': allowed are auto"),
        ('adapter = "fedthee"', "unknown adapter 'fedthee'; there are:"),
        ('adapter = "fedthe[gamma=1]"', "fedthe has no option 'gamma'"),
        ('adapter = "fedthe[beta=much]"', "beta='much' is not a number"),
        ('adapter = "fedthe[beta=2]"', "adapter = 'fedthe[beta=2]': beta=2.0 is outside [0, 1]"),
        ('adapter = "tent[lr=-1]"', "adapter = 'tent[lr=-1]': lr=-1.0 is outside [0, inf)"),
        ('adapter = "fedthe[beta=2]"\nruntime = "onnx"', "adapter = 'fedthe[beta=2]': beta=2.0 is outside [0, 1]"),
        ('adapter = "auto[every=10; among=t3a+em]"\nruntime = "onnx"', "every=10: allowed is 0, or at least probe=200"),
        ('adapter = "auto[every=10]"', "every=10: allowed is 0, or at least probe=200"),
        ('adapter = "fedicon[mode=offline]"', "needs a whole test set"),
        ('adapter = "auto"\nrole = "target"', "adapter = 'auto': with role = 'target' there are no labels"),
        ('adapter = "fedthe"\nrole = "target"', "there are no labels to learn descriptor, personal_head from"),
        ('adapter = "auto[among=tent+fedthee]"', "unknown adapter 'fedthee'; there are:"),
        ('adapter = "auto[among=auto]"', "auto cannot be a candidate"),
        ('adapter = "auto[among=knn_per]"', "knn_per cannot be a candidate of an agent"),
        ('adapter = "auto[among=tent]"\nruntime = "onnx"', "tent adapts the network itself"),
        ('listen = "localhost"', "allowed are unix:<path> and <host>:<port>"),
        ('listen = "0.0.0.0:7000"', "TCP needs mutual TLS; set certificate, key, client-ca"),
        (TLS, "certificate, key, client-ca: allowed with listen or metrics = <host>:<port> only"),
        ('metrics = "9464"', "metrics = '9464': allowed is <host>:<port>"),
        ('metrics = "localhost:99999"', "metrics = 'localhost:99999': allowed is <host>:<port>"),
        ('metrics = "0.0.0.0:9464"', "other addresses need mutual TLS: set certificate, key, client-ca"),
        ('metrics = "localhost.example.org:9464"', "allowed without TLS is 127.0.0.1, [::1] or localhost"),
        ('metrics = "127.0.0.1:9464"\ncertificate = "a"', "mutual TLS needs key, client-ca, too"),
        ('relay = "localhost:7001"', "relay = 'localhost:7001': allowed is unix:<path>"),
        ('listen = "unix:one"\nrelay = "unix:one"', "each needs its own socket"),
        ("policy = 3", "policy = 3: allowed is a table [policy]"),
        ('model = "~no-such-user/m"', "model = '~no-such-user/m': "),
        ('data = "folder:~no-such-user/d"', "data = 'folder:~no-such-user/d': "),
        ('listen = "unix:~no-such-user/s"', "listen = 'unix:~no-such-user/s': "),
    ],
)
def test_a_wrong_key_is_named_with_the_file(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
    assert "device.toml" in str(caught.value)


@pytest.mark.parametrize("key", ["name", "state-dir"])
def test_what_must_be_set_is_named(tmp_path: Path, key: str) -> None:
    lines = [line for line in LEAST.splitlines() if not line.startswith(key)]
    (tmp_path / "device.toml").write_text("\n".join(lines))
    with pytest.raises(SettingsError, match=f"{key}: must be set"):
        AgentConfig.from_toml(tmp_path / "device.toml")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"name": "a/b"}, "name = 'a/b': allowed are 1 to 64 letters"),
        ({"name": ".."}, "name = '..'"),
        ({"name": "a" * 65}, "name = 'aaa"),
        ({"data": "folder:x", "class_map": "pneumo"}, "class-map: 'pneumo' is not of the form"),
        ({"data": "folder:x", "class_map": "a=b;a=c"}, "class-map: a is given twice"),
        ({"class_map": "a=b"}, "class-map: allowed with data only"),
        ({"data": "/site/a"}, "data = '/site/a': allowed are folder:PATH, npz:FILE, hf:PATH and package.module:Class"),
        ({"data": "folder:"}, "data = 'folder:': allowed are folder:PATH"),
        ({"data": "foldr:/site/a"}, "data = 'foldr:/site/a': allowed are folder:PATH"),
    ],
)
def test_names_that_cannot_be_used_are_refused(tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(told)):
        AgentConfig(**{"name": "site-a", "state_dir": str(tmp_path), **keys})


def test_a_relative_path_of_the_data_is_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    for data, found in {
        "folder:images": f"folder:{tmp_path / 'images'}",
        "npz:/else/where.npz": "npz:/else/where.npz",
        "hf:saved": f"hf:{tmp_path / 'saved'}",
        "hf:owner/name": "hf:owner/name",
        "mypackage.mymodule:MyDataset(x)": "mypackage.mymodule:MyDataset(x)",
    }.items():
        (tmp_path / "device.toml").write_text(f'{LEAST}data = "{data}"\n')
        assert AgentConfig.from_toml(tmp_path / "device.toml").data == found


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.toml"):
        AgentConfig.from_toml(tmp_path / "none.toml")


def test_a_new_models_check_gets_its_limits(tmp_path: Path) -> None:
    config = read(tmp_path, 'model = "m.safetensors"\naccept-margin = 0.1\naccept-one-class = 0.8\n')
    assert (config.acceptance.margin, config.acceptance.one_class, config.acceptance.agreement) == (0.1, 0.8, 0.3)
    assert config.model == str(tmp_path / "m.safetensors")
    assert (config.shadow_samples, config.approval, config.models_kept) == (0, False, 3)


def test_what_is_not_said_about_data_is_left_to_the_run(tmp_path: Path) -> None:
    assert read(tmp_path).limits_of_data == {"max-megapixels": 100.0}
    given = read(tmp_path, "max-megapixels = 2\nmax-skipped = 0\nimage-cache-mb = 7\n").limits_of_data
    assert given == {"max-megapixels": 2.0, "max-skipped": 0.0, "image-cache-mb": 7}
