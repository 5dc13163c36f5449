"""Federated learning of adaptation rates with real clients in one process: requests, cohorts, results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from fedtta.client.app import app as client_app
from fedtta.client.node import Node, perform
from fedtta.client.state import MemoryState
from fedtta.messages.arrays import digest
from fedtta.messages.flower import allow_messages
from fedtta.messages.grid import GridTransport
from fedtta.messages.replies import RefinedRates
from fedtta.messages.requests import Evaluate, Identify, RefineRates, Request, Train
from fedtta.models import load_arrays, load_model, save_arrays
from fedtta.server.app import serve
from fedtta.server.events import NodesMissing
from fedtta.server.rates import initial_rates, save_rates
from fedtta.server.report.page import write_report
from fedtta.server.report.results import read_results
from fedtta.settings import Settings, SettingsError, to_json
from tests.flower import LocalGrid
from tests.server.test_run import assert_same_results, events
from tests.transports import FakeTransport, devices

ATP = Settings(
    clients=4,
    fraction=0.15,
    rounds=0,
    image_size=16,
    partition="iid",
    model="resnet20-bn",
    model_options="depth=8;width=4",
    methods="atp",
    shifts="original",
    rates_rounds=3,
    rates_clients=2,
    rates_batch_size=7,
    device="cpu",
    node_timeout=5,
    round_timeout=60,
)


def run(folder: Path, settings: Settings = ATP, **options: Any) -> FakeTransport:
    """Run with the clients' private state beside the run folder; return the transport, which has all requests."""
    settings = settings.replace(state_dir=str(folder.parent / "state"))
    transport = devices(settings, **options)
    serve(transport, settings, folder)
    return transport


def of(folder: Path, kind: str) -> list[dict]:
    return [event for event in events(folder) if event["event"] == kind]


def asked(transport: FakeTransport) -> list[tuple[int, RefineRates]]:
    """Partition and request, in order."""
    sent = [(900 - one.node, one.request) for one, _ in transport.sent]
    return [(partition, request) for partition, request in sent if isinstance(request, RefineRates)]


def carried(transport: FakeTransport) -> list[tuple[int, int]]:
    """Round and partition of the requests that bring the network."""
    return [(request.round, partition) for partition, request in asked(transport) if request.arrays is not None]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FakeTransport]:
    allow_messages()
    folder = tmp_path_factory.mktemp("rates") / "r"
    return folder, run(folder)


def names_and_bytes(folder: Path) -> tuple[list[str], int]:
    """Return the modules in the network's order of definition, and the bytes of D_w numbers."""
    state = load_model(folder / "model.safetensors")[0].global_state()
    return list(state), sum(value.numel() * value.element_size() for value in state.values())


def test_the_network_travels_once_and_then_only_one_number_a_module(finished: tuple[Path, FakeTransport]) -> None:
    folder, transport = finished
    names, network = names_and_bytes(folder)
    seen: set[int] = set()
    for event in of(folder, "rates_round"):
        requests = [(partition, one) for partition, one in asked(transport) if one.round == event["round"]]
        assert [partition for partition, _ in requests] == event["sampled"] == event["replied"]
        new = 0
        for partition, request in requests:
            assert (request.arrays is not None) is (partition not in seen)
            assert list(request.rates) == names
            new += partition not in seen
            seen.add(partition)
        assert event["bytes_up"] == 2 * len(names) * 8
        assert event["bytes_down"] == 2 * len(names) * 8 + new * network
        assert event["context_bytes"] == 0
        assert event["variant"] == "all"
        assert 0 <= event["accuracy"] <= 1
        assert event["loss"] > 0
    # some client was asked twice, so that there was something to save
    assert len(seen) < len(asked(transport)) == 6


def test_the_cohort_is_drawn_by_partition(finished: tuple[Path, FakeTransport]) -> None:
    sampled = [event["sampled"] for event in of(finished[0], "rates_round")]
    assert sampled == [
        sorted(np.random.default_rng([ATP.seed, round]).choice(4, 2, replace=False).tolist()) for round in (1, 2, 3)
    ]


def test_rates_are_the_mean_of_what_the_devices_make_of_them(finished: tuple[Path, FakeTransport]) -> None:
    """All rounds without a server."""
    folder, _ = finished
    settings = ATP.replace(state_dir=str(folder.parent / "alone"))
    arrays = {name: value.numpy() for name, value in load_model(folder / "model.safetensors")[0].global_state().items()}
    rates: dict[str, float] = {}
    for event in of(folder, "rates_round"):
        replies = []
        for partition in event["sampled"]:
            sent = {name: np.float64(value) for name, value in rates.items()}
            request = RefineRates(
                settings=to_json(settings), run="alone", round=event["round"], variant="all", network=digest(arrays),
                arrays=arrays, rates=sent,
            )  # fmt: skip
            reply = perform(request, Node(str(partition), MemoryState()))
            assert isinstance(reply, RefinedRates)
            replies.append(reply)
        rates = {name: sum(float(reply.rates[name]) for reply in replies) / 2 for name in arrays}
        samples = [reply.num_examples for reply in replies]
        assert event["accuracy"] == sum(reply.correct for reply in replies) / sum(samples)
        mean = sum(reply.loss * n for reply, n in zip(replies, samples, strict=True)) / sum(samples)
        assert event["loss"] == pytest.approx(mean, rel=1e-12)
    (told,) = of(folder, "rates")
    assert list(told["rates"]) == list(told["sizes"]) == list(arrays)  # in the order of definition
    assert told["rates"] == pytest.approx(rates, rel=1e-12, abs=1e-15)
    assert told["sizes"] == {name: value.size for name, value in arrays.items()}
    saved, notes = load_arrays(folder / "rates.safetensors")
    assert {name: float(value) for name, value in saved.items()} == told["rates"]
    assert notes == {"training": "cross_entropy", "variant": "all"}
    assert all(rate != 0 for name, rate in told["rates"].items() if name.endswith("running_var"))


def test_equal_bits_whatever_the_node_ids_and_the_order_of_arrival(
    finished: tuple[Path, FakeTransport], tmp_path: Path
) -> None:
    folder, _ = finished
    settings = ATP.replace(state_dir=str(tmp_path / "state"))
    renamed = devices(settings, ids=[5, 77, 3, 12].__getitem__, order=lambda requests: requests[::-1])
    serve(renamed, settings, tmp_path / "again")
    assert_same_results(tmp_path / "again", folder)
    for kind in ("rates", "rates_round"):
        for one, other in zip(of(folder, kind), of(tmp_path / "again", kind), strict=True):
            timeless = [
                {k: v for k, v in event.items() if k not in ("at", "wall_seconds", "digest")} for event in (one, other)
            ]
            assert timeless[0] == timeless[1]


def test_a_run_goes_on_from_saved_rates(finished: tuple[Path, FakeTransport], tmp_path: Path) -> None:
    """Without rounds of its own it reproduces them, and their results."""
    folder, _ = finished
    changes = {"init": str(folder / "model.safetensors"), "rates_init": str(folder / "rates.safetensors")}
    transport = run(tmp_path / "r", ATP.replace(rates_rounds=0, **changes))
    assert not asked(transport)
    assert of(tmp_path / "r", "rates")[0]["rates"] == of(folder, "rates")[0]["rates"]
    assert_same_results(tmp_path / "r", folder)
    run(tmp_path / "more", ATP.replace(rates_rounds=1, **changes))
    assert of(tmp_path / "more", "rates")[0]["rates"] != of(folder, "rates")[0]["rates"]


def test_heads_that_no_client_adapts_have_no_rate(tmp_path: Path) -> None:
    """Training with rotations adds a head, which ATP leaves alone."""
    folder = tmp_path / "r"
    run(folder, ATP.replace(methods="atp[training=rotation]", rates_rounds=1))
    names, _ = names_and_bytes(folder)
    (event,) = of(folder, "rates")
    assert (
        list(event["rates"]) == list(event["sizes"]) == [one for one in names if not one.startswith("rotation_head.")]
    )
    assert len(event["rates"]) == len(names) - 2


def test_rates_that_do_not_fit_are_refused_before_training(
    finished: tuple[Path, FakeTransport], tmp_path: Path
) -> None:
    folder, _ = finished
    rates = str(folder / "rates.safetensors")
    for number, (changes, told) in enumerate(
        [
            (
                {"rates_init": rates, "model_options": "depth=14;width=4"},
                r"rates of another network; encoder\..*one of",
            ),
            ({"rates_init": rates, "methods": "atp[adapt=stats]"}, "rates of variant 'all', wanted is 'stats'"),
            ({"rates_init": "nowhere.safetensors"}, "rates-init = 'nowhere.safetensors': there is no file"),
        ]
    ):
        with pytest.raises(SettingsError, match=told):
            run(tmp_path / str(number), ATP.replace(rounds=1, **changes))
        assert not of(tmp_path / str(number), "round")


def test_rates_files(tmp_path: Path) -> None:
    names = ["b.weight", "a.running_var"]
    save_rates(tmp_path / "r.safetensors", {"b.weight": 0.25, "a.running_var": -1e-300}, "ce", "params")
    back = initial_rates(str(tmp_path / "r.safetensors"), names, "params")
    assert (list(back), back) == (names, {"b.weight": 0.25, "a.running_var": -1e-300})
    assert initial_rates("", names, "params") == {"b.weight": 0.0, "a.running_var": 0.0}
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "r.safetensors").read_bytes()[:-3])
    with pytest.raises(SettingsError, match=r"cut\.safetensors.*corrupt"):
        initial_rates(str(tmp_path / "cut.safetensors"), names, "params")
    save_arrays(tmp_path / "bare.safetensors", {name: np.float64(1) for name in names})
    with pytest.raises(SettingsError, match="rates of variant None"):
        initial_rates(str(tmp_path / "bare.safetensors"), names, "params")


def test_variants_move_their_own_modules_only_and_share_one_network(tmp_path: Path) -> None:
    methods = "atp[adapt=params],atp[adapt=stats],atp[adapt=params;mode=online]"
    transport = run(tmp_path / "r", ATP.replace(methods=methods, rates_rounds=1, rates_clients=0))
    told = {event["variant"]: event["rates"] for event in of(tmp_path / "r", "rates")}
    assert list(told) == ["params", "stats"]
    for variant, rates in told.items():
        statistics = {name for name in rates if name.endswith(("running_mean", "running_var"))}
        still = statistics if variant == "params" else set(rates) - statistics
        assert {rates[name] for name in still} == {0.0}
        assert all(rates[name] != 0 for name in set(rates) - still)
        saved, notes = load_arrays(tmp_path / "r" / f"rates-{variant}.safetensors")
        assert {name: float(value) for name, value in saved.items()} == rates
        assert notes["variant"] == variant
    assert not (tmp_path / "r" / "rates.safetensors").exists()
    assert carried(transport) == [(1, 0), (1, 1), (1, 2), (1, 3)]  # once for both
    assert len(asked(transport)) == 8
    assert {event["method"] for event in of(tmp_path / "r", "evaluation")} == set(methods.split(","))


def test_a_network_that_a_client_lost_is_sent_again(tmp_path: Path) -> None:
    """Its disk was wiped before round 2: it fails, and has the network again in round 3."""

    def wipe(partition: int, request: Request) -> None:
        if partition == 1 and isinstance(request, RefineRates) and request.round == 2:
            (kept,) = (tmp_path / "node1" / "networks").iterdir()
            kept.unlink()

    settings = ATP.replace(rates_clients=0)
    transport = run(tmp_path / "r", settings, watch=wipe, config=lambda i: {"state-dir": str(tmp_path / f"node{i}")})
    (failed,) = of(tmp_path / "r", "failed")
    assert (failed["partition"], failed["round"]) == (1, 2)
    network = asked(transport)[0][1].network
    assert f"network {network[:12]} is not here; it must be sent again" in failed["reason"]
    assert [event["replied"] for event in of(tmp_path / "r", "rates_round")] == [[0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3]]
    assert carried(transport) == [(1, 0), (1, 1), (1, 2), (1, 3), (3, 1)]
    assert of(tmp_path / "r", "end")[0]["status"] == "completed"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda reply: {"rates": {**reply.rates, "head.bias": np.array(math.nan)}}, "head.bias: values that are not"),
        (lambda reply: {"correct": 10_000}, "correct = 10000"),
    ],
)
def test_a_bad_reply_is_refused_and_the_round_goes_on(change: Callable, told: str, tmp_path: Path) -> None:
    settings = ATP.replace(rates_clients=0, rates_rounds=2, state_dir=str(tmp_path / "state"))
    transport = devices(settings)
    client = transport.clients[900]

    def spoiled(request: Request) -> Any:
        reply = client(request)
        bad = isinstance(request, RefineRates) and request.round == 1
        return replace(reply, **change(reply)) if bad else reply  # type: ignore[type-var]

    transport.clients[900] = spoiled
    serve(transport, settings, tmp_path / "r")
    (refused,) = of(tmp_path / "r", "refused")
    assert (refused["partition"], refused["round"]) == (0, 1)
    assert told in refused["reason"]
    first, second = of(tmp_path / "r", "rates_round")
    assert (first["replied"], second["replied"]) == ([1, 2, 3], [0, 1, 2, 3])
    assert all(math.isfinite(rate) for rate in of(tmp_path / "r", "rates")[0]["rates"].values())


def test_the_context_that_flower_ships_never_holds_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a state folder the personal head is in it, and no other large array; through Flower's messages."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    settings = ATP.replace(rounds=1, local_epochs=1, rates_rounds=1, rates_clients=0)

    def node(partition: int) -> Callable[[Message], RecordDict]:
        config = {"name": str(partition)}
        context = Context(run_id=1, node_id=partition, node_config=config, state=RecordDict(), run_config={})
        return lambda message: client_app(message, context).content

    grid = LocalGrid({900 - i: node(i) for i in range(settings.clients)})
    serve(GridTransport(grid), settings, tmp_path / "r")
    _, network = names_and_bytes(tmp_path / "r")
    (event,) = of(tmp_path / "r", "rates_round")
    head = 10 * 16 * 4  # [K, d] float32, no bias
    assert 4 * head < event["context_bytes"] < 4 * network / 4
    assert len(list(tmp_path.glob("fedtta-*/networks/*.safetensors"))) == 1


def test_loss_and_accuracy_that_noise_hides_are_not_reported_as_zero(tmp_path: Path) -> None:
    run(tmp_path / "r", ATP.replace(rates_rounds=1, differential_privacy="rates=1/1"))
    (event,) = of(tmp_path / "r", "rates_round")
    assert (event["loss"], event["accuracy"]) == (None, None)
    (entry,) = read_results(tmp_path / "r" / "metrics.jsonl").rates_rounds
    assert (entry.loss, entry.accuracy) == (None, None)
    assert write_report(tmp_path / "r").is_file()


def test_sources_train_and_targets_are_tested(tmp_path: Path) -> None:
    settings = ATP.replace(
        methods="fedavg,atp", rounds=1, local_epochs=1, target_fraction=0.25, domains="corruptions", partition="step",
        rates_clients=0, rates_rounds=1,
    )  # fmt: skip
    transport = run(tmp_path / "r", settings)
    (clients,) = of(tmp_path / "r", "clients")
    sources = [partition for partition, role in enumerate(clients["roles"]) if role == "source"]
    (target,) = (partition for partition, role in enumerate(clients["roles"]) if role == "target")
    assert len(sources) == 3
    assert of(tmp_path / "r", "round")[0]["sampled"] == sources
    assert of(tmp_path / "r", "rates_round")[0]["sampled"] == sources
    evaluated = of(tmp_path / "r", "evaluation")
    assert {(event["method"], event["partition"]) for event in evaluated} == {("fedavg", target), ("atp", target)}
    assert {event["total"] for event in evaluated} == {clients["sizes"][target][2]}
    (check,) = of(tmp_path / "r", "leak_check")
    assert (check["leaked"], check["checked"]) == (0, clients["sizes"][target][2])
    kinds = {type(one.request) for one, _ in transport.sent}
    assert kinds == {Identify, Train, RefineRates, Evaluate}  # no statistics: no row needs them


@pytest.mark.parametrize(
    ("roles", "methods", "told"),
    [
        (["target"] * 4, "fedavg,btfl", "all clients are targets: some must train and some must test"),
        (["target"] * 4, "atp", "all clients are targets: some must train and some must test"),
        (["source"] * 4, "atp", "all clients are sources: some must train and some must test"),
    ],
)
def test_what_the_roles_rule_out_is_refused_before_training(
    roles: list[str], methods: str, told: str, tmp_path: Path
) -> None:
    settings = ATP.replace(methods=methods, rounds=1)
    with pytest.raises(SettingsError, match=told):
        run(tmp_path / "r", settings, config=lambda partition: {"role": roles[partition]})
    assert not of(tmp_path / "r", "round")
    assert not of(tmp_path / "r", "rates_round")


def test_a_client_whose_role_a_method_rules_out_is_left_alone(tmp_path: Path) -> None:
    """It would end the run for all others; a run that waits for all clients names it."""
    settings = ATP.replace(methods="fedavg,btfl,personal", rounds=1, model="cnn", model_options="", node_timeout=0.5)
    told = "1: role = 'target': btfl, personal need clients that train"
    roles = {1: {"role": "target"}}
    with pytest.raises(NodesMissing, match=rf"3 of 4 clients are there after 0.5 s: 0, 2, 3; node 899: {told}"):
        run(tmp_path / "all", settings, config=lambda partition: roles.get(partition, {}))
    run(tmp_path / "some", settings.replace(min_clients=3), config=lambda partition: roles.get(partition, {}))
    assert [event["reason"] for event in of(tmp_path / "some", "left_alone")] == [told]
    assert of(tmp_path / "some", "end")[0]["status"] == "completed"


def test_a_node_with_a_role_that_its_data_do_not_allow_ends_the_run_by_name(tmp_path: Path) -> None:
    settings = ATP.replace(target_fraction=0.25)
    with pytest.raises(NodesMissing, match=r"role = 'both': allowed for client \d are (source|target)"):
        run(tmp_path / "r", settings, config=lambda partition: {"role": "both"})
