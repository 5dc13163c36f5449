"""Whole runs, server and real clients, in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from fedtta.client.node import federation_of
from fedtta.messages.flower import allow_messages
from fedtta.messages.requests import Evaluate, Request, Summarize, Train
from fedtta.models import build, load_arrays, load_model, save_model
from fedtta.server import app
from fedtta.server.adaptation import check_collaborations
from fedtta.server.app import run_folder, serve
from fedtta.server.events import NodesMissing, NoReplies, RunError
from fedtta.server.members import FederationInfo
from fedtta.server.methods import plan
from fedtta.server.network import model_spec
from fedtta.server.report import read_results, table
from fedtta.server.run import few_tested, notes
from fedtta.settings import Settings, SettingsError
from tests.transports import devices

SMALL = Settings(
    clients=3,
    fraction=0.15,
    rounds=2,
    local_epochs=1,
    image_size=16,
    methods="fedavg,personal,fixed_mix,fedthe,btfl",
    learning_rate=0.1,
    device="cpu",
    node_timeout=5,
    round_timeout=60,
)


Watch = Callable[[int, Request], object]


def run(folder: Path, settings: Settings = SMALL, watch: Watch = lambda partition, request: None) -> Path:
    """Run with real clients; `watch` is called with partition and request before each reply, and may raise."""
    serve(devices(settings, watch=watch), settings, folder)
    return folder


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_results(one: Path, other: Path) -> None:
    """Models, statistics and tables of two runs are equal bit for bit."""
    files, tables = (sorted(path.name for path in one.glob(kind)) for kind in ("*.safetensors", "*.csv"))
    assert files == sorted(path.name for path in other.glob("*.safetensors"))
    assert tables == sorted(path.name for path in other.glob("*.csv"))
    for name in files:
        ours, theirs = load_arrays(one / name)[0], load_arrays(other / name)[0]
        assert {k: v.tobytes() for k, v in ours.items()} == {k: v.tobytes() for k, v in theirs.items()}, name
    for name in tables:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    allow_messages()
    return run(tmp_path_factory.mktemp("run") / "r")


def test_a_run_folder_is_complete(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert {"settings.toml", "metrics.jsonl", "table.csv", "model.safetensors", "statistics.safetensors"} <= names
    assert {"report.html", "model-balanced_softmax.safetensors", "statistics-balanced_softmax.safetensors"} <= names
    assert not [name for name in names if name.endswith(".tmp")]
    results = read_results(finished / "metrics.jsonl")
    assert results.end is not None
    assert results.end.status == "completed"
    assert [row.method for row in table(results)] == ["fedavg", "personal", "fixed_mix", "btfl", "fedthe"]


def test_no_test_sample_was_trained_on(finished: Path) -> None:
    checks = [event for event in events(finished) if event["event"] == "leak_check"]
    assert len(checks) == 2
    assert all(check["leaked"] == 0 and check["checked"] > 0 for check in checks)


def test_statistics_file_is_the_mean_over_clients_of_the_saved_model(finished: Path) -> None:
    model, spec = load_model(finished / "model.safetensors")
    assert (spec["name"], spec["classes"]) == ("cnn", list("0123456789"))
    assert (spec["preprocessing"]["image_size"], spec["preprocessing"]["channels"]) == (16, spec["in_channels"])
    federation = federation_of(SMALL)
    means = []
    for split in federation.splits:
        z = model.features(federation.images.batch(split.train, "cpu"))
        means.append(z.detach().double().mean(0).numpy())
    arrays, _ = load_arrays(finished / "statistics.safetensors")
    np.testing.assert_allclose(arrays["descriptor"], np.mean(means, axis=0), atol=1e-6)
    assert arrays["dle"].min() >= 0
    assert arrays["dle"].max() <= 1


def test_fedavg_row_is_the_saved_model_on_the_test_splits(finished: Path) -> None:
    model, _ = load_model(finished / "model.safetensors")
    federation = federation_of(SMALL)
    for event in events(finished):
        if event["event"] == "evaluation" and (event["method"], event["shift"]) == ("fedavg", "original"):
            test = federation.splits[event["partition"]].test
            right = model(federation.images.batch(test, "cpu")).argmax(1).numpy() == federation.images.labels[test]
            assert (int(right.sum()), len(test)) == (event["correct"], event["total"])


def test_same_seed_same_bits_other_seed_other_bits(finished: Path, tmp_path: Path) -> None:
    again = run(tmp_path / "again")
    other = run(tmp_path / "other", SMALL.replace(seed=2, methods="fedavg"))
    assert_same_results(again, finished)
    ours, theirs = (load_arrays(folder / "model.safetensors")[0] for folder in (finished, other))
    assert not any((ours[name] == theirs[name]).all() for name in ours)


def test_private_state_in_a_folder_gives_the_same_bits(finished: Path, tmp_path: Path) -> None:
    settings = SMALL.replace(state_dir=str(tmp_path / "state"))
    again = run(tmp_path / "again", settings)
    assert_same_results(again, finished)
    kept = sorted(path.stem for path in (tmp_path / "state").rglob("*.safetensors"))
    tags = [f"{training}@{round}" for training in ("balanced_softmax", "cross_entropy") for round in (1, 2, 3)]
    assert kept == sorted(tags * 3)  # three clients: the last two tags of each training, and those of two checkpoints
    # where it lived has no effect on the result
    (started,) = (event["settings"] for event in events(again) if event["event"] == "run")
    assert set(started) == set(settings.flat()) - {"state-dir"}


@pytest.mark.drawn
def test_a_client_that_raises_mid_round_is_reported_and_the_round_goes_on(tmp_path: Path) -> None:
    def watch(partition: int, request: Request) -> None:
        if partition == 1 and isinstance(request, Train) and request.round == 2:
            raise RuntimeError("sensor unplugged")

    folder = run(tmp_path / "r", SMALL.replace(methods="fedavg,btfl"), watch)
    (failed,) = [event for event in events(folder) if event["event"] == "failed"]
    assert (failed["partition"], failed["round"], failed["training"]) == (1, 2, "cross_entropy")
    assert "sensor unplugged" in failed["reason"]
    rounds = [event for event in events(folder) if event["event"] == "round"]
    assert [event["replied"] for event in rounds] == [[0, 1, 2], [0, 2]]
    assert "sensor unplugged" in (folder / "report.html").read_text()


@pytest.mark.drawn
def test_means_that_do_not_speak_for_all_clients_say_so(tmp_path: Path) -> None:
    def watch(partition: int, request: Request) -> None:
        if partition == 1 and isinstance(request, Summarize | Evaluate):
            raise RuntimeError("gone")

    folder = run(tmp_path / "r", SMALL.replace(methods="fedavg,btfl", rounds=1), watch)
    notes = [event["text"] for event in events(folder) if event["event"] == "note"]
    assert notes[-2:] == [
        f"cross_entropy: {what} of 2 of 3 clients only; missing: 1" for what in ("statistics", "accuracies")
    ]
    assert notes[-1] in (folder / "report.html").read_text()


def test_test_sets_that_say_little_are_noted() -> None:
    def note(sizes: list[int], roles: list[str], labelled: tuple[bool, ...] = (True, True, True)) -> str:
        counts = [[40, 9, size] for size in sizes]
        data = [{"labelled": one} for one in labelled]
        about = {"classes": ["a", "b"], "channels": 3, "mean": [0.5], "std": [0.5], "shifts": ["original"], "note": ""}
        return few_tested(FederationInfo(**about, sizes=counts, roles=roles, data=data))

    told = "test samples: 2 of 3 clients have fewer than 10, the smallest test set has 0: there, one sample moves"
    assert note([9, 10, 0], ["both"] * 3).startswith(told)
    assert note([10, 10, 0], ["target", "target", "source"]) == ""
    assert note([10, 10, 0], ["both"] * 3, (True, True, False)) == ""


def test_a_fraction_of_clients_a_round_and_all_of_them_at_the_end(tmp_path: Path) -> None:
    folder = run(tmp_path / "r", SMALL.replace(fraction_train=0.34, rounds=3, methods="personal,btfl"))
    rounds = [event for event in events(folder) if event["event"] == "round"]
    assert all(len(event["sampled"]) == 1 for event in rounds)
    (statistics,) = [event for event in events(folder) if event["event"] == "statistics"]
    assert statistics["replied"] == [0, 1, 2]
    evaluated = {event["partition"] for event in events(folder) if event["event"] == "evaluation"}
    assert evaluated == {0, 1, 2}


def test_fedprox_without_its_pull_is_fedavg_bit_for_bit_and_qffl_runs(tmp_path: Path) -> None:
    settings = SMALL.replace(methods="fedavg", shifts="original")
    models = {}
    for name, changes in {
        "fedavg": {},
        "still": {"aggregation": "fedprox", "proximal_mu": 0.0},
        "pulled": {"aggregation": "fedprox", "proximal_mu": 1.0},
        "qffl": {"aggregation": "qffl", "fairness": 1.0},
    }.items():
        folder = run(tmp_path / name, settings.replace(**changes))
        assert events(folder)[-1]["status"] == "completed"
        models[name] = load_arrays(folder / "model.safetensors")[0]
    assert all(models["still"][name].tobytes() == value.tobytes() for name, value in models["fedavg"].items())
    for other in ("pulled", "qffl"):
        assert any(models[other][name].tobytes() != value.tobytes() for name, value in models["fedavg"].items())


def test_statistics_are_asked_for_only_where_a_row_needs_them(finished: Path, tmp_path: Path) -> None:
    assert [event["training"] for event in events(finished) if event["event"] == "statistics"] == [
        "cross_entropy", "balanced_softmax",
    ]  # fmt: skip
    folder = run(tmp_path / "r", SMALL.replace(methods="fedavg", shifts="original", rounds=1))
    assert not [event for event in events(folder) if event["event"] == "statistics"]
    assert not (folder / "statistics.safetensors").exists()
    (plan,) = [event for event in events(folder) if event["event"] == "plan"]
    assert plan["steps"] == 2


def test_init_starts_from_a_file_without_training(finished: Path, tmp_path: Path) -> None:
    init = finished / "model.safetensors"
    folder = run(tmp_path / "r", SMALL.replace(init=str(init), rounds=0, methods="fedavg,btfl", personal_epochs=3))
    ours, _ = load_arrays(folder / "model.safetensors")
    theirs, _ = load_arrays(init)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_an_option_out_of_range_is_refused_before_training(tmp_path: Path) -> None:
    folder, settings = tmp_path / "r", SMALL.replace(methods="fedavg,fedthe[beta=-1]")
    with pytest.raises(SettingsError, match=r"methods: fedthe\[beta=-1\]: beta=-1"):
        run(
            folder,
            settings,
            watch=lambda partition, request: pytest.fail("trained") if isinstance(request, Train) else None,
        )
    assert not [event for event in events(folder) if event["event"] == "round"]


def test_a_network_from_outside_that_a_method_cannot_adapt_is_refused_before_training(tmp_path: Path) -> None:
    settings = SMALL.replace(model="tests.models.nets:no_averages", methods="fedavg,tent")
    with pytest.raises(SettingsError, match=r"methods: tent: encoder\.body\.0 keeps no running statistics"):
        run(tmp_path / "r", settings)
    assert not [event for event in events(tmp_path / "r") if event["event"] == "round"]


def test_a_run_that_fails_says_so_in_its_files(tmp_path: Path) -> None:
    def watch(partition: int, request: Request) -> None:
        if isinstance(request, Train):
            raise RuntimeError("no")

    with pytest.raises(NoReplies, match=r"clients 0, 1, 2: RuntimeError: no"):
        run(tmp_path / "r", watch=watch)
    assert events(tmp_path / "r")[-1]["status"].startswith("failed: NoReplies")
    assert (tmp_path / "r" / "report.html").exists()


def test_events_of_which_no_report_can_be_made_are_an_error_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedtta.server.app.run", lambda *known: known[3]("rates"))
    with pytest.raises(RunError, match=r"report of .* could not be written: .*line 1: 'training' is missing"):
        run(tmp_path / "r")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"dataset": "digit"}, "digits"),
        ({"shifts": "brfl,nightly"}, "btgfl"),
        ({"dataset": "cifar10", "data_dir": "/nowhere"}, "nowhere"),
    ],
)
def test_unknown_names_stop_the_run_before_training_and_list_what_exists(
    change: dict, part: str, tmp_path: Path
) -> None:
    with pytest.raises(NodesMissing, match=part):
        run(tmp_path / "r", SMALL.replace(**change))
    assert not [event for event in events(tmp_path / "r") if event["event"] == "round"]


def test_fewer_nodes_than_clients(tmp_path: Path) -> None:
    with pytest.raises(NodesMissing, match=r"of 5 clients are there after 0\.05 s"):
        serve(devices(SMALL), SMALL.replace(clients=5, node_timeout=0.05), tmp_path / "r")


INFO = FederationInfo(["a", "b"], 3, [0.5] * 3, [0.5] * 3, ["original"], "", [[1, 1, 1]])


def test_the_normalization_of_a_model_file_is_taken_and_another_one_is_refused(tmp_path: Path) -> None:
    """With the data set's a network that had 95 % had 62."""
    file, settings = tmp_path / "m.safetensors", SMALL.replace(methods="fedavg", rounds=0, shifts="original")
    stated = {**model_spec(settings, INFO), "num_classes": 10, "classes": list("0123456789")}
    stated |= {"mean": [0.25, 0.1 + 0.2, 0.5], "std": 0.125}
    save_model(file, build(**stated), stated)
    folder = run(tmp_path / "auto", settings.replace(init=str(file)))
    spec = load_model(folder / "model.safetensors")[1]
    assert (spec["mean"], spec["std"]) == (stated["mean"], [0.125] * 3)
    assert not [one for one in events(folder) if one["event"] == "note" and "trained with" in one["text"]]
    run(tmp_path / "same", settings.replace(init=str(file), normalization="0.25,0.3,0.5;0.125"))
    refused = (
        r"init = '.*m\.safetensors': it was trained with normalization = '0.25,0.3,0.5;0.125,0.125,0.125', and the run "
        r"has normalization = 'half', which is '0.5,0.5,0.5;0.5,0.5,0.5'; allowed are auto, for the file's own, and '0"
    )
    with pytest.raises(SettingsError, match=refused):
        run(tmp_path / "other", settings.replace(init=str(file), normalization="half"))


@pytest.mark.parametrize(("options", "random"), [("depth=8", True), ("pretrained=w.pth", False)])
def test_only_a_network_without_training_and_weights_is_called_random(options: str, random: bool) -> None:
    settings = SMALL.replace(
        methods="tent", model="resnet20-bn", model_options=options, rounds=0, collaborations="none"
    )  # fmt: skip
    trainings = plan(settings)
    found = notes(settings, trainings, check_collaborations(settings, trainings), INFO, [], build("cnn", 2))
    assert ("no init: the network that is adapted is random" in found) is random


@pytest.mark.parametrize(
    ("own", "name"), [({}, "digits"), ({"classes": "a,b"}, "devices"), ({"devices": "*"}, "devices")]
)
def test_a_run_folder_is_called_by_the_data(own: dict[str, str], name: str, tmp_path: Path) -> None:
    assert run_folder(Settings(results=str(tmp_path), seed=4, **own)).name.startswith(f"{name}-4-")  # type: ignore[arg-type]


@pytest.mark.parametrize("fails", [False, True])
def test_the_log_of_a_run_ends_with_the_folder_of_its_results(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who submits a run with no name did not learn where its results are, on the SuperLink's machine."""

    def serving(transport: object, settings: Settings, folder: Path, **_: object) -> None:
        folder.mkdir()
        if fails:
            raise RunError("no")

    monkeypatch.setattr(app, "serve", serving)
    monkeypatch.setattr(app, "GridTransport", lambda grid: None)
    monkeypatch.setattr(app, "configure", lambda *known: None)
    grid, context = Mock(), Mock(run_config={"results": str(tmp_path)})
    with caplog.at_level("INFO"), pytest.raises(RunError) if fails else nullcontext():
        app.main(grid, context)
    (folder,) = tmp_path.iterdir()
    assert caplog.messages[-1] == f"results: {folder}"


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="/file/r cannot be made: "):
        run(tmp_path / "file" / "r")


def test_a_run_folder_is_not_used_twice(tmp_path: Path) -> None:
    settings = Settings(results=str(tmp_path), run_name="one")
    folder = run_folder(settings)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(FileExistsError, match="one"):
        run_folder(settings)


def test_a_secure_sum_of_statistics_includes_clients_that_have_never_trained(tmp_path: Path) -> None:
    settings = SMALL.replace(clients=5, methods="fedthe[training=fedper]", shifts="original", rounds=1)
    settings = settings.replace(fraction_train=0.6)  # the heads of the others are those that they are sent
    settings = settings.replace(max_share=0.0, clip_factor=0.0)  # which sums do not have
    plain = run(tmp_path / "plain", settings)
    secure = run(tmp_path / "secure", settings.replace(secure_aggregation=True))
    (done,) = [event for event in events(secure) if event["event"] == "statistics"]
    assert done["replied"] == [0, 1, 2, 3, 4]
    expected = load_arrays(plain / "statistics.safetensors")[0]
    for name, value in load_arrays(secure / "statistics.safetensors")[0].items():
        np.testing.assert_allclose(value, expected[name], atol=1e-4, err_msg=name)
