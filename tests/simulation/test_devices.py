"""Simulations of devices with data of their own: every file is a client, with the bits of boxes that have the data."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from fedtta.client.config import AgentConfig
from fedtta.client.node import Node, perform
from fedtta.client.own import _of_run
from fedtta.client.sites import device_files, simulated_nodes
from fedtta.client.state import MemoryState
from fedtta.messages.arrays import Arrays
from fedtta.messages.flower import allow_messages
from fedtta.messages.transport import Addressed, Answer, answer_of
from fedtta.models import load_arrays
from fedtta.server.app import serve
from fedtta.server.events import RunError
from fedtta.server.report import METRICS_FILE, read_results
from fedtta.server.report.page import REPORT_FILE
from fedtta.settings import Settings, SettingsError, parse_class_map
from fedtta.simulation import engine, flower_cli, simulate
from fedtta.simulation.__main__ import main as command
from fedtta.simulation.engine import with_devices
from tests.client.folders import OWN, device_file, folder, sites

RUN = OWN.replace(rounds=1, stacked_clients=1)


class Boxes:
    """Devices with state of their own, which answer in any order."""

    def __init__(self, files: Sequence[Path], state: Path) -> None:
        configs = [AgentConfig.from_toml(path) for path in files]
        self.by_node = {
            100 - number: Node(
                one.name, MemoryState(), one.data, one.role or None, {"state-dir": str(state / one.name)},
                class_map=parse_class_map(one.class_map),
            )
            for number, one in enumerate(configs)
        }  # fmt: skip

    def nodes(self) -> list[int]:
        return list(self.by_node)

    def exchange(self, requests: Sequence[Addressed], timeout: float) -> Iterator[Answer]:
        for one in random.Random(1).sample(requests, len(requests)):
            _of_run.cache_clear()  # every request is answered by a process of its own
            yield answer_of(one, perform(one.request, self.by_node[one.node]).to_record())


def found(results: Path) -> tuple[dict[str, Arrays], list[tuple[object, ...]]]:
    """All models and statistics of a run, and the counts of its evaluations."""
    arrays = {path.name: load_arrays(path)[0] for path in results.glob("*.safetensors")}
    evaluations = read_results(results / METRICS_FILE).evaluations
    return arrays, [(one.method, one.shift, one.partition, one.correct, one.total) for one in evaluations]


def assert_same(one: Path, other: Path) -> None:
    (arrays, counts), (expected, same) = found(one), found(other)
    assert counts == same
    assert len(counts) > 0
    assert arrays.keys() == expected.keys()
    for name, values in arrays.items():
        for key, value in values.items():
            assert np.array_equal(value, expected[name][key]), (name, key)


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with three sites, one of them without labels, and the results of their deployment."""
    path = tmp_path_factory.mktemp("sites")
    files = sites(path)
    allow_messages()
    settings = RUN.replace(results=str(path / "results"), run_name="deployed")
    serve(Boxes(files, path / "boxes"), settings, path / "deployed")
    return path, path / "deployed"


def test_a_simulation_has_the_bits_of_the_boxes(boxes: tuple[Path, Path], tmp_path: Path) -> None:
    """In one process; `tests/integration/test_simulation.py` has the other engines."""
    path, deployed = boxes
    settings = RUN.replace(devices=str(path / "*.toml"), engine="vectorised", results=str(tmp_path), clients=1)
    results = simulate(settings)
    assert_same(results, deployed)
    lines = map(json.loads, (results / METRICS_FILE).read_text(encoding="utf-8").splitlines())
    (clients,) = [line for line in lines if line["event"] == "clients"]
    assert clients["names"] == ["site-a", "site-b", "site-c"]
    assert clients["roles"] == ["both", "both", "target"]


def test_the_folder_of_the_files_and_the_place_of_the_run_do_not_matter(
    boxes: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, deployed = boxes
    for part in ("a", "b", "c"):
        shutil.copytree(path / part, tmp_path / "moved" / part)
    for file in path.glob("*.toml"):
        shutil.copy(file, tmp_path / "moved" / f"renamed-{file.name[::-1][5:]}.toml")
    monkeypatch.chdir(tmp_path)
    settings = RUN.replace(devices="moved/*.toml", engine="vectorised", results=str(tmp_path / "results"))
    assert_same(simulate(settings), deployed)


def test_clients_are_the_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number, name in enumerate(["10", "b", "9", "a"]):
        device_file(tmp_path, name, f"folder-{number}", role="source", class_map="x=y")
    settings = with_devices(OWN.replace(devices=str(tmp_path / "*.toml"), image_cache_mb=100))
    assert settings.clients == 4
    nodes = simulated_nodes(settings)
    assert [node.name for node in nodes] == ["9", "10", "a", "b"]
    assert nodes[0].source == f"folder:{tmp_path / 'folder-2'}"
    assert (nodes[0].role, nodes[0].class_map) == ("source", {"x": "y"})
    assert [node.settings["image-cache-mb"] for node in nodes] == [25] * 4
    assert len({id(node.state) for node in nodes}) == 4


def test_a_file_that_leaves_limits_to_the_run_is_a_device(tmp_path: Path) -> None:
    text = 'name = "a"\ndata = "folder:x"\nmax-skipped = {}\nimage-cache-mb = {}\n'
    (tmp_path / "a.toml").write_text(text.format("-1.0", 0))
    (one,) = simulated_nodes(OWN.replace(devices=str(tmp_path / "a.toml"), image_cache_mb=100))
    assert one.settings == {"image-cache-mb": 100}
    (tmp_path / "b.toml").write_text(text.format(0.5, 7))
    (one,) = simulated_nodes(OWN.replace(devices=str(tmp_path / "b.toml"), image_cache_mb=100))
    assert one.settings == {"image-cache-mb": 7, "max-skipped": 0.5}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"min_replies": 13}, "min-replies = 13: allowed is at most clients = 12"),
        ({"min_clients": 13}, "min-clients = 13: allowed is at most clients = 12"),
        ({"max_clients": 11}, "max-clients = 11: allowed is at least clients = 12, or 0"),
    ],
)
def test_what_is_compared_with_the_number_of_clients_is_compared_with_that_of_the_files(
    tmp_path: Path, changes: dict[str, int], told: str
) -> None:
    """Whatever `clients` is: here the 3 of `OWN`."""
    for number in range(12):
        device_file(tmp_path, str(number), "a")
    devices = str(tmp_path / "*.toml")
    assert with_devices(OWN.replace(devices=devices, min_replies=12, min_clients=12, max_clients=12)).clients == 12
    with pytest.raises(SettingsError, match=told):
        with_devices(OWN.replace(devices=devices, **changes))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('name = "a"\nstate-dir = "s"\n', "data: must be set"),
        ('data = "folder:x"\nstate-dir = "s"\n', "name: must be set"),
        ('name = "a"\ndata = "folder:x"\nadaptor = "x"\n', "unknown key 'adaptor'"),
        ('name = "a/b"\ndata = "folder:x"\n', "name = 'a/b'"),
        ('name = "same"\ndata = "folder:x"\n', "another device has it"),
        ("name = [", "Invalid value"),
    ],
)
def test_a_file_that_is_no_device_is_named(tmp_path: Path, content: str, told: str) -> None:
    device_file(tmp_path, "same", "x")
    (tmp_path / "wrong.toml").write_text(content)
    for read in (with_devices, simulated_nodes):  # the latter alone under `flwr run`
        with pytest.raises(SettingsError, match=told) as caught:
            read(OWN.replace(devices=str(tmp_path / "*.toml")))
        assert str(caught.value).count("wrong.toml") == 1


def test_devices_that_do_not_exist_or_whose_data_do_not_fit_are_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no such file"):
        simulate(OWN.replace(devices=str(tmp_path / "*.toml")))
    device_file(tmp_path, "site-a", "a")
    folder(tmp_path / "a", {"blue": 10, "purple": 10})
    settings = OWN.replace(devices=str(tmp_path / "*.toml"), results=str(tmp_path / "results"))
    with pytest.raises(SettingsError, match=r"device site-a: .*purple"):
        simulate(settings)
    assert not (tmp_path / "results").exists()


@pytest.mark.drawn
def test_devices_train_and_then_adapt_to_streams_of_their_own_test_images(
    boxes: tuple[Path, Path], tmp_path: Path
) -> None:
    """A divided data set refuses this, since its streams are drawn from all images."""
    settings = RUN.replace(
        devices=str(boxes[0] / "*.toml"), engine="vectorised", results=str(tmp_path), methods="tent",
        collaborations="fedavg", stream_batch=4, model="resnet20-bn", model_options="depth=8;width=4",
    )  # fmt: skip
    results = simulate(settings)
    assert results.name.startswith("devices-1-")
    found = read_results(results / METRICS_FILE)
    assert len(found.rounds) == RUN.rounds
    assert found.adapt_rounds
    tests = [sizes[2] for sizes in found.clients.sizes]
    adapted = {
        partition: sum(sum(one.total) for one in found.adapted if one.partition == partition) for partition in (0, 1)
    }
    assert all(0 < adapted[partition] <= tests[partition] for partition in adapted)
    assert not any("random" in note for note in found.notes)
    assert "devices' own data · resnet20-bn" in (results / REPORT_FILE).read_text(encoding="utf-8")


def test_commands_count_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites(tmp_path / "sites")
    served: list[Settings] = []

    def stop(transport: object, settings: Settings, *_: object) -> None:
        served.append(settings)
        raise RunError("far enough")

    monkeypatch.setattr(engine, "serve", stop)
    monkeypatch.chdir(tmp_path)
    words = ["--classes", OWN.classes, "--engine", "vectorised", "--clients", "7", "--image-size", "16"]
    assert command(["--devices", "sites/*.toml", *words]) == 1
    submission = flower_cli.parse(["--set", "devices=sites/*.toml", f"classes={OWN.classes}"])
    assert [settings.clients for settings in served] == [3]
    assert "num-supernodes=3 " in submission.federation()
    assert submission.config["clients"] == 3
    assert submission.config["devices"] == str(tmp_path / "sites" / "*.toml")


def test_brackets_in_the_name_of_a_folder_are_no_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "study [1] *"
    folder.mkdir()
    paths = [device_file(folder, name, "x") for name in ("a", "b [2]")]
    assert device_files(str(folder / "*.toml")) == paths
    assert device_files(str(paths[1])) == paths[1:]
    assert device_files(str(tmp_path / "*/a.toml")) == paths[:1]


def test_a_divided_data_set_is_left_as_it_is() -> None:
    settings = Settings(clients=2)
    assert with_devices(settings) is settings
    assert [node.name for node in simulated_nodes(settings)] == ["0", "1"]


@pytest.mark.parametrize("below", ["", "more"])
def test_a_state_dir_that_cannot_be_is_refused_before_the_run(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = Settings(state_dir=str(tmp_path / "file" / below), results=str(tmp_path / "results"))
    with pytest.raises(SettingsError, match=r"state-dir = .*: allowed is a folder to write in"):
        simulate(settings)
    assert not (tmp_path / "results").exists()
