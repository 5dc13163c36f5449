"""Rows of the methods table: parsing, grouping by training, refusals."""

import re
from pathlib import Path
from typing import Any

import pytest

from fedtta.client.algorithms import ALGORITHMS
from fedtta.client.algorithms.training import OBJECTIVES
from fedtta.server import methods as table_of_methods
from fedtta.server.methods import METHODS, check_roles, choose, left_out_notes, parse_rows, plan
from fedtta.server.trainings import TRAININGS
from fedtta.settings import Settings, SettingsError
from fedtta.tta.registry import ADAPTERS
from tests.server.test_run import SMALL, events, run


def test_every_method_names_things_that_exist() -> None:
    for method in METHODS.values():
        assert method.adapter in ADAPTERS
        assert method.training in TRAININGS
    for recipe in TRAININGS.values():
        for stage in recipe.stages:
            assert stage.personal_head == ALGORITHMS[stage.algorithm].uses_personal_head
            assert stage.objective in OBJECTIVES
        recipe.settings(Settings())  # its changes are settings


def test_every_adapter_has_a_method() -> None:
    assert {method.adapter for method in METHODS.values()} == set(ADAPTERS)


def test_rows_with_options_are_typed() -> None:
    rows = parse_rows("fedthe, fedthe[beta=1; objective=em],btfl[strength=8;training=balanced_softmax]")
    assert [row.label for row in rows] == [
        "fedthe",
        "fedthe[beta=1;objective=em]",
        "btfl[strength=8;training=balanced_softmax]",
    ]
    assert rows[1].options == {"beta": 1.0, "objective": "em"}
    assert rows[2].training == "balanced_softmax"
    assert "training" not in rows[2].options


def test_rows_as_in_published_code_are_parsed() -> None:
    norms = "tent[layers=batchnorm2d],eata[layers=batchnorm2d]"
    assert parse_rows("roid[use_consistency=false]")[0].options == {"use_consistency": False}
    rows = parse_rows(f"roid[divide=batch],bbn[between=sample],surgical[adapt=params],{norms}")
    options = [{"divide": "batch"}, {"between": "sample"}, {"adapt": "params"}, *2 * [{"layers": "batchnorm2d"}]]
    assert [row.options for row in rows] == options
    with pytest.raises(SettingsError, match="one of samples, batch"):
        parse_rows("roid[divide=most]")


def test_methods_of_one_training_share_it() -> None:
    trainings = plan(Settings(methods="fedavg,fedthe,personal,btfl,fedthe_plus,fedavg_ft"))
    assert [(t.name, [r.label for r in t.rows]) for t in trainings] == [
        ("cross_entropy", ["fedavg", "personal", "btfl", "fedavg_ft"]),
        ("balanced_softmax", ["fedthe", "fedthe_plus"]),
    ]


def test_the_network_that_an_adapter_gets() -> None:
    rows = parse_rows("fedavg,fedavg_ft,t3a[base=personalised],ditto[base=global],memo[base=personalised;views=4]")
    assert [row.base for row in rows] == ["global", "personalised", "personalised", "global", "personalised"]
    assert rows[4].options == {"views": 4}
    with pytest.raises(SettingsError, match="base = 'mine'; allowed: global, personalised"):
        parse_rows("t3a[base=mine]")


def test_what_a_training_changes_and_keeps_on_clients() -> None:
    names = ["encoder.a.weight", "encoder.n.weight", "encoder.n.running_mean", "head.weight"]
    assert TRAININGS["fedrep"].aggregated_names(names) == names[:3]
    assert TRAININGS["fedbn"].aggregated_names(names) == [names[0], names[3]]
    assert TRAININGS["local"].aggregated_names(names) == []
    assert TRAININGS["fedicon"].aggregated_names(names) == names
    settings = Settings(rounds=7, classifier_rounds=3, model_options="width=4")
    assert TRAININGS["fedicon"].rounds(settings) == 10
    assert TRAININGS["fedper"].rounds(settings) == 7
    assert TRAININGS["rotation"].settings(settings).model_options == "width=4;rotation_head=true"
    assert TRAININGS["qffl"].settings(settings).aggregation == "qffl"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"methods": "ttt[training=cross_entropy]"}, "ttt.*training = 'cross_entropy'; allowed: rotation"),
        ({"methods": "fedrod[training=ditto]"}, "training = 'ditto'; allowed: fedrod"),
        ({"methods": "btfl[training=ditto]"}, "training = 'ditto'; with a personal head are: cross_entropy, "),
        ({"methods": "fedbn"}, "fedbn keeps BatchNorm on the clients, which cnn lacks"),
        ({"methods": "auto[among=tent]"}, "tent] adapts BatchNorm, which cnn lacks"),
        ({"methods": "auto[among=fedrod]"}, "training = 'cross_entropy'; allowed: fedrod"),
        (
            {"methods": "fedrep", "aggregation": "gma"},
            "fedrep keeps arrays on the clients: aggregation = 'gma'; allowed is fedavg",
        ),
        ({"methods": "fedavg_ft", "target_fraction": 0.5}, "fedavg_ft need clients that train"),
        ({"methods": "fedper", "target_fraction": 0.5}, "fedper need clients that train"),
        ({"methods": "knn_per", "target_fraction": 0.5}, "knn_per need clients that train"),
        ({"methods": "fedrod", "target_fraction": 0.5}, "fedrod need clients that train"),
        ({"methods": "fedavg_ft", "target_domain": "webcam"}, "fedavg_ft need clients that train"),
    ],
)
def test_adapters_and_trainings_that_do_not_fit(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        plan(Settings(**settings))
    assert plan(Settings(methods="em,bbse,surgical,shot,t3a", target_fraction=0.5))


@pytest.mark.parametrize(
    ("methods", "parts"),
    [
        ("fedavg,fedteh", ["'fedteh'", "fedthe_plus", "btfl"]),
        ("", ["unknown method ''"]),
        ("btfl[strenght=3]", ["strenght", "strength"]),
        ("btfl[strength=many]", ["strength", "many"]),
        ("fedthe[objective=mean]", ["objective", "mean"]),
        ("fedthe[training=mse]", ["training = 'mse'", "balanced_softmax"]),
        ("fedthe,fedthe", ["twice"]),
        ("fedthe[beta]", ["name=value"]),
        ("auto[among=fedthe+tnet]", ["auto[among=fedthe+tnet]: unknown adapter 'tnet'", "tent"]),
        ("auto[among=auto]", ["auto cannot be a candidate"]),
    ],
)
def test_refusals(methods: str, parts: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_rows(methods)
    for part in parts:
        assert part in str(caught.value)


def test_variants_of_rates_are_those_of_the_rows() -> None:
    (training,) = plan(Settings(methods="fedavg,atp[adapt=stats],atp,atp[mode=online],atp[adapt=stats;mode=online]"))
    assert training.variants == ["stats", "all"]
    assert plan(Settings(methods="fedavg,btfl"))[0].variants == []


@pytest.mark.parametrize(
    ("methods", "roles", "told"),
    [
        ("fedavg,atp", ["source", "target"], None),
        ("fedavg,atp", ["both", "target", "source"], None),
        ("fedavg,fedthe", ["both", "both"], None),
        ("fedavg,fedthe", ["source", "both"], None),
        ("fedthe,fedavg,fixed_mix,personal,btfl", ["source", "target"], "methods: fedthe, fixed_mix, personal, btfl"),
        ("fedavg", ["target", "target"], "all clients are targets"),
        ("fedavg", ["source", "source"], "all clients are sources"),
    ],
)
def test_clients_that_only_test_have_no_personal_head(methods: str, roles: list[str], told: str | None) -> None:
    trainings = plan(Settings(methods=methods))
    if told is None:
        check_roles(trainings, roles)
        return
    with pytest.raises(SettingsError, match=r"need clients that train|some must train and some must test") as caught:
        check_roles(trainings, roles)
    assert all(part in str(caught.value) for part in told.replace("methods: ", "").split(", "))


def test_the_settings_alone_rule_out_personal_heads_for_targets() -> None:
    with pytest.raises(SettingsError, match="methods: btfl need clients that train, and target clients do not"):
        plan(Settings(methods="atp,btfl", target_fraction=0.2))
    assert plan(Settings(methods="atp,fedavg", target_fraction=0.2))


@pytest.mark.parametrize("method", ["bn_adapt", "tent", "cotta", "rotta", "roid", "bbn"])
def test_methods_that_adapt_batchnorm_need_a_network_with_it(method: str) -> None:
    with pytest.raises(
        SettingsError, match=f"methods: {method} adapts BatchNorm, which cnn lacks; fitting: .*resnet20-bn"
    ):
        plan(Settings(methods=method, model="cnn"))
    assert plan(Settings(methods=method, model="resnet20-bn"))


@pytest.mark.parametrize(
    ("model", "model_options", "batchnorm"),
    [("cnn", "", False), ("cnn", "norm=batch", True), ("shallow-cnn", "", True), ("resnet20-gn", "", False)],
)
def test_batches_of_one_are_refused_where_a_network_with_batchnorm_is_trained(
    model: str, model_options: str, batchnorm: bool
) -> None:
    settings = Settings(methods="fedavg", model=model, model_options=model_options, batch_size=1)
    if batchnorm:
        with pytest.raises(SettingsError, match=f"batch-size = 1: .* 2 or more with BatchNorm, which {model} has"):
            plan(settings)
    for fitting in (settings.replace(batch_size=2), settings.replace(rounds=0), *([] if batchnorm else [settings])):
        assert plan(fitting)


@pytest.mark.parametrize(
    "row", ["btfl[reading=published]", "btfl[leave_one_out=20]", "btfl[reading=published;leave_one_out=none]"]
)
def test_the_own_share_is_taken_out_of_a_uniform_mean_alone(row: str) -> None:
    for changes in ({"statistics_weighting": "examples"}, {"aggregation": "fedmedian"}):
        told = rf"methods: {re.escape(row)} takes a client's own share out of .*statistics-weighting = 'uniform'"
        with pytest.raises(SettingsError, match=told):
            plan(Settings(methods=row, **changes))
        assert plan(Settings(methods="btfl,btfl[reading=published;leave_one_out=0]", **changes))
    assert plan(Settings(methods=row))


def test_fedprox_is_refused_where_no_loss_has_its_term() -> None:
    with pytest.raises(SettingsError, match="methods: apfl trains without a proximal term: aggregation = 'fedprox'"):
        plan(Settings(methods="fedavg,apfl", aggregation="fedprox"))
    assert plan(Settings(methods="fedavg,fedprox,ditto,ttt", aggregation="fedprox"))
    assert plan(Settings(methods="fedprox,apfl,fedrod"))


def test_unknown_model_lists_what_exists() -> None:
    with pytest.raises(SettingsError, match="resnet20-gn"):
        plan(Settings(model="vgg"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_options": "width=x"}, "model-options = 'width=x': .* no option 'width'; there are: bias, .*norm"),
        ({"model_options": "norm=b"}, "norm='b' is not allowed; it must be one of None, 'batch'"),
        ({"model_options": "pretrained=3", "model": "resnet18"}, "pretrained=3 is not allowed; .* the path of a file"),
        ({"model_options": "groups=5", "model": "resnet20-gn"}, "groups=5"),  # 16 channels: the backbone knows
        ({"image_size": 12}, "model = 'cnn': .*image_size=12 is too small; the minimum is 16"),
    ],
)
def test_a_network_that_cannot_be_built_is_refused_before_any_client_is_asked(
    changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(SettingsError, match=told):
        plan(Settings(methods="fedavg", **changes))


def test_external_networks_are_asked_for_what_a_method_needs() -> None:
    vit = Settings(methods="fedavg", model="timm:vit_tiny_patch16_224")
    assert plan(vit)
    for methods, told in (
        ("tent", "tent adapts BatchNorm, which timm:vit_tiny_patch16_224 lacks; fitting: .*resnet20-bn"),
        ("btfl", "btfl needs features that are not negative, which .* may be; fitting: .* features=relu"),
    ):
        with pytest.raises(SettingsError, match=told):
            plan(vit.replace(methods=methods))
    assert plan(vit.replace(methods="btfl", model_options="features=relu"))
    assert plan(Settings(methods="tent,btfl", model="timm:resnet10t"))
    left_out = choose(vit.replace(methods="all"))[1]
    assert any("features=relu" in reason and labels == ["btfl"] for reason, labels in left_out.items())
    with pytest.raises(SettingsError, match="timm has no such network; similar ones"):
        plan(Settings(model="timm:resnet10tt"))


BATCHNORM = {"model_options": "norm=batch"}
ON_BATCHNORM = {"bbn", "bn_adapt", "tent", "eata", "cotta", "rotta", "roid"}


def labels_of(settings: Settings) -> set[str]:
    return {row.label for training in plan(settings) for row in training.rows}


def test_all_is_the_whole_table_where_everything_fits() -> None:
    settings = Settings(methods="all", **BATCHNORM)
    assert labels_of(settings) == set(METHODS)
    assert choose(settings)[1] == {}
    assert left_out_notes(settings, ["both"] * 10) == []
    more = plan(settings.replace(methods="all,fedthe[beta=1]"))
    assert [row.label for row in more[1].rows] == ["fedthe", "fedthe_plus", "fedthe[beta=1]"]
    with pytest.raises(SettingsError, match="tent is named twice"):
        plan(settings.replace(methods="all,tent"))


@pytest.mark.parametrize(
    ("changes", "missing", "reason"),
    [
        (
            {},
            ON_BATCHNORM,
            "adapts BatchNorm, which cnn lacks; fitting: cnn with model-options norm=batch, resnet20-bn",
        ),
        ({}, {"fedbn"}, "keeps BatchNorm on the clients, which cnn lacks; fitting: cnn with model-options norm=batch"),
        ({"model": "cct-4/3x2"}, ON_BATCHNORM, "adapts BatchNorm, which cct-4/3x2 lacks"),
        (
            {"aggregation": "qffl", **BATCHNORM},
            {"local", "fedper", "fedrep", "fedbn", "fedicon", "fedicon_us"},
            "keeps arrays on the clients: aggregation = 'qffl'; allowed is fedavg",
        ),
        (
            {"aggregation": "fedprox", **BATCHNORM},
            {"fedrod", "apfl"},
            "trains without a proximal term: aggregation = 'fedprox'; allowed are fedavg, fedavgm, qffl",
        ),
        ({"init": "m.safetensors", **BATCHNORM}, {"ttt"}, "needs a rotation head"),
    ],
)
def test_all_leaves_out_what_does_not_fit_and_says_why(changes: dict[str, Any], missing: set[str], reason: str) -> None:
    settings = Settings(methods="all", **changes)
    rows, left_out = choose(settings)
    ((why, labels),) = [(why, labels) for why, labels in left_out.items() if why.startswith(reason)]
    assert set(labels) == missing
    everything = [row.label for row in rows] + [label for group in left_out.values() for label in group]
    assert sorted(everything) == sorted(METHODS)
    start = f"methods = all leaves out {', '.join(labels)}: {'it' if len(labels) == 1 else 'each'} {why}"
    assert start in left_out_notes(settings, [])


@pytest.mark.parametrize("changes", [{"target_fraction": 0.5}, {"target_domain": "webcam"}])
def test_all_with_clients_that_only_test(changes: dict[str, Any]) -> None:
    settings = Settings(methods="all", **BATCHNORM, **changes)
    stay = {"fedavg", "fedprox", "fedavgm", "qffl", "gma", "fedavg_views", "ttt", "memo", "t3a", "shot", "surgical"}
    assert labels_of(settings) == stay | ON_BATCHNORM | {"atp", "em", "bbse"}


def test_all_with_clients_that_turn_out_to_only_test() -> None:
    settings = Settings(methods="all", **BATCHNORM)
    roles = ["both", "target", "both"]
    (trained, *_) = plan(settings, roles)
    assert {row.label for row in trained.rows} & {"fedavg", "personal", "atp"} == {"fedavg", "atp"}
    (note,) = left_out_notes(settings, roles)
    assert "btfl" in note
    assert note.endswith("each needs clients that train, and target clients do not")
    with pytest.raises(SettingsError, match="all clients are targets"):
        plan(settings, ["target"])


def test_all_in_test_time_rounds_is_what_clients_can_help_each_other_with() -> None:
    settings = Settings(methods="all", rounds=0, collaborations="none,fedavg", **BATCHNORM)
    assert labels_of(settings) == {"fedavg"} | ON_BATCHNORM


def test_a_method_by_name_that_does_not_fit_is_refused_beside_all() -> None:
    with pytest.raises(
        SettingsError, match=r"methods: tent\[lr=0.1\] adapts BatchNorm, which cnn lacks; fitting: cnn with"
    ):
        plan(Settings(methods="all,tent[lr=0.1]"))


def notes_of(folder: Path) -> list[str]:
    return [event["text"] for event in events(folder) if event["event"] == "note"]


def test_a_run_of_all_methods_fills_the_whole_table(tmp_path: Path) -> None:
    few = {"clients": 2, "fraction": 0.06, "rounds": 1, "classifier_rounds": 1, "rates_rounds": 1, "tune_samples": 2}
    folder = run(tmp_path / "r", SMALL.replace(methods="all", shifts="original", **BATCHNORM, **few))
    found = events(folder)
    assert not [event for event in found if event["event"] in ("failed", "late", "refused")]
    cells = {(event["method"], event["partition"]) for event in found if event["event"] == "evaluation"}
    assert cells == {(method, client) for method in METHODS for client in range(2)}
    assert notes_of(folder) == ["memo, fedthe_plus, ttt: measured on the first 2 samples of each stream and client"]


def test_a_run_brings_candidates_what_they_need(tmp_path: Path) -> None:
    """Statistics on request, memorized samples and learned rates: none of which the others of `auto` need."""
    few = {"clients": 2, "fraction": 0.1, "rounds": 1, "rates_rounds": 1}
    methods = "auto[among=em+bbse+surgical+knn_per+atp]"
    folder = run(tmp_path / "r", SMALL.replace(methods=methods, shifts="original", **few))
    found = events(folder)
    assert not [event for event in found if event["event"] in ("failed", "late", "refused")]
    assert [event["method"] for event in found if event["event"] == "evaluation"] == [methods] * 2


@pytest.mark.drawn
def test_a_run_notes_what_all_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three = {name: METHODS[name] for name in ("fedavg", "tent", "personal")}
    monkeypatch.setattr(table_of_methods, "METHODS", three)
    folder = run(tmp_path / "r", SMALL.replace(methods="all", shifts="original", rounds=1))
    (note,) = notes_of(folder)
    assert note.startswith("methods = all leaves out tent: it adapts BatchNorm, which cnn lacks; fitting: cnn with")
    assert {event["method"] for event in events(folder) if event["event"] == "evaluation"} == {"fedavg", "personal"}
    assert "leaves out tent" in (folder / "report.html").read_text()
