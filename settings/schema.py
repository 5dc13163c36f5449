"""Every setting with its type, default, range and meaning."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

Scalar = bool | int | float | str
#: Values of `aggregation` that withstand wild clients.
ROBUST = ("fedmedian", "fedtrimmedavg", "krum", "multikrum")
#: Field → the values that a new split in every round is defined for: all clients train in all rounds, and all test.
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "partition": ("equal", "dirichlet", "iid"),
    "target_fraction": (0.0,),
    "target_domain": ("",),
    "unseen_domain": ("",),
    "collaborations": ("",),
    "fraction_train": (1.0,),
    "train_part": (1.0,),
    "test_part": (1.0,),
}


#: In place of a default: the key must be set.
REQUIRED: Any = dataclasses.MISSING


class SettingsError(ValueError):
    """A setting is unknown, of the wrong type or impossible.

    The message names the key, the value and what is allowed.
    """


def setting(
    default: Any,
    help: str,
    choices: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    group: str | tuple[str, ...] = (),
) -> Any:
    """Declare a field for `check`: `low <= value <= high`, or `value > above`, or one of `choices`; and its groups."""
    groups = (group,) if isinstance(group, str) else group
    metadata = {"help": help, "choices": choices, "low": low, "high": high, "above": above, "groups": groups}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """All settings of a run, validated on construction; a key is the field's name with hyphens.

    Raises
    ------
    SettingsError
        A value has the wrong type or lies outside what is allowed.
    """

    # What is run
    seed: int = setting(1, "one seed, one result", low=0, high=2**31 - 1, group="data")
    methods: str = setting(
        "fedavg,personal,fixed_mix,fedthe,fedthe_plus,btfl",
        "rows of the table, or all that fit; e.g. 'fedavg,btfl,fedthe[beta=1;objective=em],tent[base=personalised]'",
    )
    shifts: str = setting("brfl", "test distributions: brfl, btgfl, or names separated by commas")
    severity: int = setting(5, "severity of the corruptions", low=1, high=5)
    tune_samples: int = setting(
        0, "methods that take gradients per sample see the first n of each stream (0: all)", low=0
    )
    init: str = setting("", "model file to start from instead of a random network")

    # Data
    dataset: str = setting("digits", "name of the data set", group="data")
    dataset_options: str = setting("", "options of the data set, e.g. 'path=pictures;domain=webcam'", group="data")
    data_dir: str = setting("", "folder of data sets; empty: the environment variable FEDTTA_DATA", group="source")
    download: bool = setting(False, "allow the data set to be downloaded", group="source")
    fraction: float = setting(1.0, "class-balanced part of the data set to use", above=0, high=1, group="data")
    image_size: int = setting(32, "images are resized to this edge", low=8, high=1024, group="data")
    clients: int = setting(10, "number of clients", low=1, high=100_000, group="data")
    partition: str = setting(
        "equal",
        "how the data are dealt out",
        choices=("equal", "dirichlet", "iid", "step", "domain", "domain_step"),
        group="data",
    )
    alpha: float = setting(0.1, "Dirichlet concentration", above=0, group="data")
    step_ratio: float = setting(
        16.0, "step partition: major over minor samples; 1: classes in equal parts", low=1, group="data"
    )
    split: str = setting(
        "once",
        "training, validation and test samples: drawn once, or anew in every round, a leak that published code has",
        choices=("once", "published"),
        group="data",
    )
    train_part: float = setting(
        1.0, "part of each client's training samples that is there", above=0, high=1, group="data"
    )
    test_part: float = setting(1.0, "part of each client's test samples that is there", above=0, high=1, group="data")
    target_fraction: float = setting(
        0.0, "share of clients that only test, without labels", low=0, high=0.99, group="data"
    )
    target_domain: str = setting(
        "", "clients of this domain only test, all others only train (partition: domain)", group="data"
    )
    unseen_domain: str = setting(
        "", "pictures of this domain are nobody's: the test distribution unseen_domain", group="data"
    )
    domains: str = setting(
        "none",
        "what sets clients' pictures apart; corruptions: one a client",
        choices=("none", "corruptions"),
        group="data",
    )

    # Model
    model: str = setting("cnn", "backbone")
    model_options: str = setting("", "options of the backbone, e.g. 'width=4;groups=2'")

    # Local training
    local_epochs: int = setting(5, "epochs of local training a round", low=1)
    personal_epochs: int = setting(1, "epochs of the personal head a round", low=0)
    personal_objective: str = setting(
        "cross_entropy", "loss of the personal head", choices=("cross_entropy", "balanced_softmax")
    )
    finetune_epochs: int = setting(1, "epochs of fine-tuning that make the final model a client's own", low=0)
    batch_size: int = setting(32, "training batch", low=1)
    optimizer: str = setting("sgd", "local optimiser", choices=("sgd", "adam"))
    learning_rate: float = setting(0.05, "learning rate (the papers: 0.01 on CIFAR-10)", above=0)
    momentum: float = setting(0.0, "momentum of SGD", low=0, high=0.9999)
    weight_decay: float = setting(5e-4, "weight decay", low=0)
    augment: bool = setting(True, "random views of training images")
    views: str = setting(
        "crop_flip",
        "these views: crop_flip (flip where the data set allows it), or FedICON's",
        choices=("crop_flip", "contrastive"),
    )
    ditto_lambda: float = setting(1.0, "Ditto: pull of the personal model towards the received one", low=0)
    rotation_weight: float = setting(1.0, "TTT: weight of telling rotations apart in training", low=0)
    temperature: float = setting(0.1, "FedICON: temperature of the loss that trains the encoder", above=0)
    classifier_rounds: int = setting(10, "FedICON: rounds of the classifier on the frozen encoder", low=0)
    classifier_epochs: int = setting(5, "FedICON: epochs that make the final classifier a client's own", low=0)

    # Federation
    rounds: int = setting(10, "training rounds", low=0)
    aggregation: str = setting(
        "fedavg",
        "how models are joined; " + ", ".join(ROBUST) + " withstand wild clients, in statistics and rates as well",
        choices=("fedavg", "fedprox", "fedavgm", "qffl", "gma", *ROBUST),
    )
    proximal_mu: float = setting(0.01, "FedProx: μ of the pull towards the received model", low=0)
    server_momentum: float = setting(0.9, "FedAvgM: momentum of the server", low=0, high=0.9999)
    mask_threshold: float = setting(0.1, "GMA: agreement from which a value moves in full", low=0, high=1)
    fairness: float = setting(1.0, "q-FFL: q, how much more clients with a large loss count", low=0)
    trim_fraction: float = setting(0.2, "fedtrimmedavg: part of the clients left out at each end", above=0, high=0.4999)
    krum_malicious: int = setting(1, "krum, multikrum: how many wild clients to withstand", low=1)
    krum_keep: int = setting(3, "multikrum: how many clients are averaged", low=1)
    fraction_train: float = setting(1.0, "fraction of clients sampled a round", above=0, high=1)
    statistics_weighting: str = setting(
        "uniform", "how client statistics are averaged", choices=("uniform", "examples")
    )
    leave_one_out: bool = setting(False, "BTFL: take the client's own share out of the global DLE")
    node_timeout: float = setting(
        300.0, "seconds to wait for all clients, or for enough of them later", above=0, group="availability"
    )
    round_timeout: float = setting(3600.0, "seconds a round may take", above=0, group="availability")
    min_replies: int = setting(
        1,
        "good replies (of fewer clients asked: all) without which a round is done again, once",
        low=1,
        group="availability",
    )
    update_norm_bound: float = setting(
        0.0, "a model or rates further than this (l2 norm) from what was sent is refused (0: no bound)", low=0
    )
    max_examples: int = setting(100_000_000, "a client that claims more examples is refused", low=1)

    # Learning adaptation rates (ATP)
    rates_rounds: int = setting(20, "rounds that learn adaptation rates, for methods that need them", low=0)
    rates_clients: int = setting(0, "clients sampled a round of rates (0: all that train)", low=0)
    rates_epochs: int = setting(1, "local epochs over the validation split a round of rates", low=1)
    rates_batch_size: int = setting(20, "batch that rates are refined on", low=1)
    rates_learning_rate: float = setting(0.1, "learning rate of the rates (the paper: 0.1, or 0.5)", above=0)
    adapt_batch_size: int = setting(20, "batch that methods defined per batch adapt to at test time", low=1)
    rates_init: str = setting("", "file of learned rates to start from instead of zeros")

    # Test-time rounds in which clients help each other
    collaborations: str = setting(
        "", "how clients help each other at test time, e.g. 'none,fedavg,pfedbbn[temperature=1]'; empty: no such rounds"
    )
    share: str = setting("all", "what clients mix", choices=("affine", "statistics", "all"))
    stream_mix: str = setting("dirichlet", "class mix of a client's stream", choices=("dirichlet", "iid", "published"))
    stream_concentration: float = setting(0.01, "Dirichlet concentration of the class mix", above=0)
    stream_size: int = setting(1000, "images of a client, met anew under each corruption", low=1)
    stream_batch: int = setting(200, "images of a client a round", low=1)
    stream_order: str = setting(
        "auto", "order of the images; auto: shuffled for iid, else by class", choices=("auto", "sorted", "shuffled")
    )
    stream_orders: int = setting(0, "different orders of corruptions; clients share them (0: each its own)", low=0)
    stream_rounds: int = setting(0, "test-time rounds (0: to the end of the streams)", low=0)

    # Where it runs
    device: str = setting("auto", "auto, cpu, cuda or cuda:<index>", group="execution")
    autocast: bool = setting(False, "bfloat16 autocast in local training")
    engine: str = setting(
        "auto",
        "what simulates clients: ray, workers that share arrays; flower, its own simulation; vectorised, in one "
        "process, with many networks trained at once; auto: ray, but vectorised on a GPU for small networks",
        choices=("auto", "ray", "flower", "vectorised"),
        group="execution",
    )
    workers: int = setting(2, "ray, flower: simulated clients that run at the same time", low=1, group="execution")
    stacked_clients: int = setting(50, "vectorised: clients that train at once, at most", low=1, group="execution")
    num_gpus: float = setting(0.0, "share of a GPU for each simulated client", low=0, group="execution")
    eval_batch_size: int = setting(256, "batch of statistics and test streams", low=1)
    state_dir: str = setting(
        "", "folder for clients' private state; empty: Flower's context, which ends with the run", group="storage"
    )
    results: str = setting("results", "folder of run folders", group="storage")
    run_name: str = setting("", "name of the run folder; empty: data set, seed and time", group="storage")
    checkpoint_every: int = setting(1, "rounds of all kinds between two checkpoints (0: none)", low=0, group="storage")
    checkpoints_kept: int = setting(2, "the last n checkpoints are kept", low=1, group="storage")
    resume: str = setting(
        "",
        "run folder, or checkpoint file in it, to go on from, with its other settings; clients need state-dir",
        group="storage",
    )

    def __post_init__(self) -> None:
        """Check every field."""
        hints = _hints()
        for field in dataclasses.fields(self):
            value = check(field, hints[field.name], getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        if self.device not in ("auto", "cpu", "cuda") and not (
            self.device.startswith("cuda:") and self.device[5:].isdigit()
        ):
            raise SettingsError(f"device = {self.device!r}: allowed are auto, cpu, cuda, cuda:<index>")
        if self.momentum and self.optimizer != "sgd":
            raise SettingsError(f"momentum = {self.momentum}: allowed with optimizer = 'sgd' only")
        if self.leave_one_out and self.statistics_weighting != "uniform":
            raise SettingsError("leave-one-out = True: allowed with statistics-weighting = 'uniform' only")
        if self.aggregation in ROBUST and (self.leave_one_out or self.statistics_weighting != "uniform"):
            raise SettingsError(
                f"aggregation = {self.aggregation!r}: allowed with leave-one-out = False and statistics-weighting = "
                f"'uniform' only, since its statistics are no means that clients weigh"
            )
        for name, allowed in PUBLISHED.items() if self.split == "published" else ():
            if getattr(self, name) not in allowed:
                words = " or ".join(repr(value) for value in allowed)
                raise SettingsError(
                    f"{key_of(name)} = {getattr(self, name)!r}: allowed with split = 'published' is {words}"
                )
        if self.min_replies > self.clients:
            raise SettingsError(f"min-replies = {self.min_replies}: allowed is at most clients = {self.clients}")
        if "/" in self.run_name or self.run_name in (".", ".."):
            raise SettingsError(f"run-name = {self.run_name!r}: allowed is a plain folder name")

    def replace(self, **changes: Any) -> Settings:
        """Return a validated copy with some fields changed (Python names)."""
        return dataclasses.replace(self, **changes)

    def select(self, *groups: str) -> dict[str, Scalar]:
        """Return key → value of all settings in any of these groups."""
        fields = [one for one in dataclasses.fields(self) if set(groups) & set(one.metadata["groups"])]
        return {key_of(field.name): getattr(self, field.name) for field in fields}

    def flat(self) -> dict[str, Scalar]:
        """Return key → value with hyphens, as Flower's configs and TOML files carry it."""
        return {key_of(field.name): getattr(self, field.name) for field in dataclasses.fields(self)}


def key_of(name: str) -> str:
    """Return the key of a field name."""
    return name.replace("_", "-")


def fields_by_key() -> dict[str, dataclasses.Field[Any]]:
    """Return key → dataclass field of every setting."""
    return {key_of(field.name): field for field in dataclasses.fields(Settings)}


def check(field: dataclasses.Field[Any], kind: type, value: Any) -> Any:
    """Return `value` as `kind` if it is allowed for `field`; raise SettingsError otherwise."""
    key = key_of(field.name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise SettingsError(f"{key} = {value!r}: allowed is a value of type {kind.__name__}")
    rule = field.metadata
    if rule["choices"] is not None and value not in rule["choices"]:
        raise SettingsError(f"{key} = {value!r}: allowed are {', '.join(rule['choices'])}")
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{key} = {value!r}: allowed is a finite number")
    if rule["low"] is not None and value < rule["low"]:
        raise SettingsError(f"{key} = {value!r}: allowed is {rule['low']} or more")
    if rule["above"] is not None and value <= rule["above"]:
        raise SettingsError(f"{key} = {value!r}: allowed is more than {rule['above']}")
    if rule["high"] is not None and value > rule["high"]:
        raise SettingsError(f"{key} = {value!r}: allowed is at most {rule['high']}")
    return value


@cache
def _hints() -> dict[str, Any]:
    """Return the types of the settings' fields; found once, since every message has settings."""
    return get_type_hints(Settings)
