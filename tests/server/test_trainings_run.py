"""Whole runs of every training: what travels, what stays, and what a lost message costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtta.messages.flower import allow_messages
from fedtta.messages.requests import Evaluate, Request, Summarize, Train
from fedtta.models import load_arrays
from fedtta.server.report import read_results, table
from fedtta.server.trainings import TRAININGS
from tests.server.test_run import SMALL, assert_same_results, events, run

#: One row a training, on a network with BatchNorm; FedICON and TTT with their own adapters.
ROWS = {
    "cross_entropy": "fedavg_ft", "balanced_softmax": "fedthe", "balanced_heads": "personal_balanced",
    "fedrod": "fedrod", "rotation": "ttt[views=2]", "fedicon": "fedicon", "fedicon_us": "fedicon_us[mode=offline]",
    "fedicon_local": "fedicon[training=fedicon_local]", "fedavg_views": "fedavg_views",
    **{name: name for name in ("local", "fedper", "fedrep", "fedbn", "ditto", "apfl")},
    **{name: name for name in ("fedprox", "fedavgm", "qffl", "gma")},
}  # fmt: skip
EVERY = SMALL.replace(
    methods=",".join(ROWS.values()),
    model_options="norm=batch",
    shifts="original",
    classifier_rounds=1,
    tune_samples=3,
    fraction=0.06,
    batch_size=16,
)


Seen = list[tuple[int, Request]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Seen]:
    allow_messages()
    seen: Seen = []
    return run(tmp_path_factory.mktemp("run") / "r", EVERY, lambda *one: seen.append(one)), seen


def names_sent(seen: Seen, training: str, *kinds: type[Request]) -> list[set[str]]:
    """The arrays in each request of a training to client 0, in order."""
    found = [request for partition, request in seen if partition == 0 and isinstance(request, kinds)]
    return [set(one.arrays) for one in found if one.task.training == training]  # type: ignore[attr-defined]


def test_every_training_ends_in_a_row(finished: tuple[Path, Seen]) -> None:
    folder, _ = finished
    assert set(ROWS) == set(TRAININGS)
    assert {row.method for row in table(read_results(folder / "metrics.jsonl"))} == set(ROWS.values())
    assert not [event for event in events(folder) if event["event"] in ("failed", "refused")]
    assert all(event["leaked"] == 0 for event in events(folder) if event["event"] == "leak_check")
    rounds = [event["training"] for event in events(folder) if event["event"] == "round"]
    assert all(rounds.count(name) == (3 if name.startswith("fedicon") else 2) for name in TRAININGS)
    # a head that is not trained has no accuracy
    for event in (one for one in events(folder) if one["event"] == "round"):
        known = event["personal_validation_accuracy"] is not None
        assert known == TRAININGS[event["training"]].personal_head, event["training"]


def test_what_a_training_keeps_on_the_clients_travels_once(finished: tuple[Path, Seen]) -> None:
    folder, seen = finished
    whole = set(load_arrays(folder / "model.safetensors")[0])
    head = {name for name in whole if name.startswith("head.")}
    layers = {name.rpartition(".")[0] for name in whole if name.endswith("running_mean")}
    norm = {name for name in whole if name.rpartition(".")[0] in layers}
    assert head
    assert norm
    for training, kept in (("fedrep", head), ("fedper", head), ("fedbn", norm), ("local", whole)):
        assert names_sent(seen, training, Train, Summarize) == [whole, whole - kept]
        assert names_sent(seen, training, Evaluate) == [whole - kept]
        (_, second) = [
            event for event in events(folder) if (event["event"], event.get("training")) == ("round", training)
        ]
        arrays = load_arrays(folder / "model.safetensors")[0]
        assert second["bytes_down"] == second["bytes_up"] == 3 * sum(arrays[name].nbytes for name in whole - kept)
    # FedICON: encoder rounds, then the classifier's; in the end all that was joined
    assert names_sent(seen, "fedicon", Train, Summarize) == [whole, whole - head, whole]
    assert names_sent(seen, "fedicon", Evaluate) == [whole]


def test_trainings_change_what_they_should(finished: tuple[Path, Seen]) -> None:
    folder, _ = finished
    models = {
        name: load_arrays(folder / f"model-{name}.safetensors")[0] for name in TRAININGS if name != "cross_entropy"
    }
    models["cross_entropy"] = load_arrays(folder / "model.safetensors")[0]
    assert "rotation_head.weight" in models["rotation"]
    assert "rotation_head.weight" not in models["fedavg_views"]

    def same(one: str, other: str, part: str = "") -> bool:
        ours, theirs = models[one], models[other]
        return all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs if name.startswith(part))

    assert same("ditto", "cross_entropy")  # their global models are FedAvg's
    assert same("apfl", "cross_entropy")
    assert same("balanced_heads", "balanced_softmax")
    for name in (
        "fedprox",
        "fedavgm",
        "qffl",
        "gma",
        "fedavg_views",
        "fedrep",
        "fedper",
        "fedbn",
        "rotation",
        "fedicon",
    ):
        assert not same(name, "cross_entropy", "encoder."), name
    assert not same("fedicon", "fedicon_us", "encoder.")


def test_a_client_whose_first_reply_is_lost_gets_everything_again(tmp_path: Path) -> None:
    """Until the server has heard of it once; from then on only what is shared travels."""
    seen: list[set[str]] = []

    def unplugged(partition: int, request: Request) -> None:
        if partition == 1 and isinstance(request, Train):
            seen.append(set(request.arrays))
            if request.round == 1:
                raise RuntimeError("unplugged")

    settings = EVERY.replace(methods="fedrep", rounds=3)
    folder = run(tmp_path / "r", settings, unplugged)
    failed = [event for event in events(folder) if event["event"] == "failed"]
    assert [(event["partition"], event["round"]) for event in failed] == [(1, 1)]
    assert [len(seen[0]), len(seen[1])] == [len(seen[0])] * 2
    assert len(seen[2]) == len(seen[0]) - 2
    (row,) = table(read_results(folder / "metrics.jsonl"))
    assert row.method == "fedrep"


def test_one_seed_one_result_for_personal_trainings(tmp_path: Path) -> None:
    settings = EVERY.replace(clients=2, methods="fedrep,ditto,apfl,fedicon[mode=offline],knn_per")
    assert_same_results(run(tmp_path / "one", settings), run(tmp_path / "two", settings))
