"""The run's settings: every key with its type, default, range, meaning and the groups that it belongs to."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from fedtta.settings.fields import SettingsError, check_fields, key_of, setting
from fedtta.settings.logs import FORMATS, LEVELS

Scalar = bool | int | float | str

#: Every group, with what its settings decide. A setting's first group is its section in help and documentation; every
#: list of "the settings that decide X" is a query over groups (`Settings.select`, `keys_in`).
GROUPS: dict[str, str] = {
    "data": "which images there are, and which of them each client trains, validates and tests on",
    "division": "which data set is divided among the clients of a simulation, and how",
    "preprocessing": "what is done to an image before it enters the network",
    "source": "where a machine finds the data set",
    "model": "the network that training starts from",
    "training": "local training",
    "aggregation": "server aggregation",
    "rates": "federated learning of adaptation rates (ATP)",
    "evaluation": "methods, test distributions and what else plays no part before the last training round",
    "streams": "the class-imbalanced corruption streams of test-time rounds",
    "collaboration": "how clients collaborate in test-time rounds",
    "privacy": "what of a client's contribution the server learns",
    "availability": "how long the server waits for clients, and for how many",
    "execution": "what runs the clients",
    "storage": "what is kept on disk, and where",
    "observation": "how a run is followed: trackers, logs and telemetry",
    "paths": "files and folders of the machine that submits the run",
    "node": "settings that a node may override in its own node config",
    "adapter": "settings that adapters' default options follow from",
}

#: What `device` may be, of a run and of an agent.
DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?")

#: What `ray-address` may be.
RAY_ADDRESS = re.compile(r"|auto|local|(ray://)?([\w.-]+|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}")

#: Of a run's name, at most: file systems take 255, and archives and temporary names add to it.
RUN_NAME_BYTES = 200


@dataclass(frozen=True)
class Settings:
    """All settings of a run, validated on construction; a key is the field's name with hyphens.

    Raises
    ------
    SettingsError
        A value has the wrong type or lies outside what is allowed.
    """

    # What is run
    seed: int = setting(1, "one seed, one result", low=0, high=2**31 - 1, group=("data", "adapter"))
    methods: str = setting(
        "fedavg,personal,fixed_mix,fedthe,fedthe_plus,btfl",
        "methods to compare, or all that fit; e.g. 'fedavg,btfl,fedthe[beta=1;objective=em],tent[base=personalised]'",
        group="evaluation",
    )
    shifts: str = setting("brfl", "test distributions: brfl, btgfl, or names separated by commas", group="evaluation")
    severity: int = setting(5, "severity of the corruptions", low=1, high=5, group=("evaluation", "streams"))
    tune_samples: int = setting(
        0, "methods that take gradients per sample see the first n of each stream (0: all)", low=0, group="evaluation"
    )
    estimate_accuracy: bool = setting(
        False, "estimate each accuracy without labels, too: one more pass over validation samples", group="evaluation"
    )
    init: str = setting("", "model file to start from instead of a random network", group=("model", "paths"))

    # Data
    dataset: str = setting("digits", "name of the data set", group=("data", "adapter", "division"))
    dataset_options: str = setting(
        "", "options of the data set, e.g. 'path=images;domain=webcam'", group=("data", "division")
    )
    data_dir: str = setting(
        "", "folder of data sets; empty: the environment variable FEDTTA_DATA", group=("source", "node", "paths")
    )
    download: bool = setting(False, "allow the data set to be downloaded", group="source")
    fraction: float = setting(
        1.0, "class-balanced part of the data set to use", above=0, high=1, group=("data", "division")
    )
    image_size: int = setting(32, "images are resized to this edge", low=8, high=1024, group=("data", "preprocessing"))
    channels: int = setting(
        3, "channels of the images: 1 (grayscale) or 3", low=1, high=3, group=("data", "preprocessing")
    )
    resize: str = setting(
        "stretch",
        "how images become square: stretch, crop (shorter edge, then the center) or pad (longer edge, then a border)",
        choices=("stretch", "crop", "pad"),
        group=("data", "preprocessing"),
    )
    interpolation: str = setting(
        "bilinear",
        "filter that resizes images",
        choices=("nearest", "bilinear", "bicubic", "lanczos"),
        group=("data", "preprocessing"),
    )
    crop_fraction: float = setting(
        1.0, "resize = crop: share of the edge that is kept", above=0, high=1, group=("data", "preprocessing")
    )
    window: str = setting(
        "",
        "raw values 'low,high' that become black and white; empty: the file's bit depth",
        group=("data", "preprocessing"),
    )
    normalization: str = setting(
        "auto",
        "mean and standard deviation of the input: auto (that of init or of pretrained weights, else the data "
        "set's), half (0.5), imagenet, or 'mean,...;std,...'",
        group="model",
    )
    classes: str = setting(
        "",
        "class names of devices with data of their own: 'covid,normal,...', or a text file, a name a line, on the "
        "machine that submits the run (plain `flwr run`: on the SuperLink's machine)",
        group="data",
    )
    devices: str = setting(
        "",
        "simulation of devices with data of their own: their files, e.g. 'sites/*.toml'; empty: divide the data set",
        group=("source", "paths"),
    )
    max_skipped: float = setting(
        0.1,
        "a device refuses to train if more than this share of its files cannot be used",
        low=0,
        high=1,
        group=("data", "node"),
    )
    max_megapixels: float = setting(100.0, "larger images of a device are skipped", above=0, group=("data", "node"))
    image_cache_mb: int = setting(
        512, "memory for images that a device has read from its files, MiB", low=1, group=("execution", "node")
    )
    clients: int = setting(
        10, "number of clients; in a deployment the number waited for", low=1, high=100_000, group=("data", "adapter")
    )
    partition: str = setting(
        "equal",
        "how the data set is divided among the clients of a simulation",
        choices=("equal", "dirichlet", "iid", "step", "domain", "domain_step"),
        group=("data", "division"),
        published=("equal", "dirichlet", "iid"),
    )
    alpha: float = setting(0.1, "Dirichlet concentration", above=0, group=("data", "division"))
    step_ratio: float = setting(
        16.0, "step partition: major over minor samples; 1: classes in equal parts", low=1, group=("data", "division")
    )
    split: str = setting(
        "once",
        "training, validation and test samples: drawn once, or redrawn in every round (a leak that published code has)",
        choices=("once", "published"),
        group="data",
    )
    train_part: float = setting(
        1.0,
        "fraction of each client's training samples to use",
        above=0,
        high=1,
        group=("data", "division"),
        published=(1.0,),
    )
    test_part: float = setting(
        1.0,
        "fraction of each client's test samples to use",
        above=0,
        high=1,
        group=("data", "division"),
        published=(1.0,),
    )
    target_fraction: float = setting(
        0.0,
        "fraction of clients that only test, without labels",
        low=0,
        high=0.99,
        group=("data", "division"),
        published=(0.0,),
    )
    target_domain: str = setting(
        "",
        "clients of this domain only test, all others only train (partition: domain)",
        group=("data", "division"),
        published=("",),
    )
    unseen_domain: str = setting(
        "",
        "hold this domain out for testing: the test distribution unseen_domain",
        group=("data", "division"),
        published=("",),
    )
    domains: str = setting(
        "none",
        "how clients' images differ; corruptions: one corruption per client",
        choices=("none", "corruptions"),
        group=("data", "division"),
    )

    # Model
    model: str = setting("cnn", "backbone", group="model")
    model_options: str = setting("", "options of the backbone, e.g. 'width=4;groups=2'", group="model")

    # Local training
    local_epochs: int = setting(5, "epochs of local training per round", low=1, group="training")
    personal_epochs: int = setting(1, "epochs of the personal head per round", low=0, group="training")
    personal_objective: str = setting(
        "cross_entropy", "loss of the personal head", choices=("cross_entropy", "balanced_softmax"), group="training"
    )
    finetune_epochs: int = setting(
        1, "epochs of fine-tuning that personalize the final model", low=0, group="evaluation"
    )
    batch_size: int = setting(32, "training batch", low=1, group="training")
    optimizer: str = setting("sgd", "local optimiser", choices=("sgd", "adam"), group="training")
    learning_rate: float = setting(0.05, "learning rate (the papers: 0.01 on CIFAR-10)", above=0, group="training")
    momentum: float = setting(0.0, "momentum of SGD", low=0, high=0.9999, group="training")
    weight_decay: float = setting(5e-4, "weight decay", low=0, group="training")
    augment: bool = setting(True, "random views of training images", group="training")
    views: str = setting(
        "crop_flip",
        "augmentation: crop_flip (flip where the data set allows it), or FedICON's views",
        choices=("crop_flip", "contrastive"),
        group="training",
    )
    ditto_lambda: float = setting(
        1.0, "Ditto: λ, pull of the personal model towards the received one", low=0, group="training"
    )
    apfl_weighs: str = setting(
        "local",
        "APFL: the model that α weighs in the mixture: local (the paper), or global, with α moving as if it were local "
        "(FedTHE's code)",
        choices=("local", "global"),
        group="training",
    )
    rotation_weight: float = setting(1.0, "TTT: weight of the rotation loss in training", low=0, group="training")
    temperature: float = setting(
        0.1, "FedICON: temperature of the loss that trains the encoder", above=0, group=("training", "adapter")
    )
    base_temperature: float = setting(
        0.0,
        "FedICON: the encoder's loss counts temperature / base-temperature times, 0.07 in published code (0: once)",
        low=0,
        group="training",
    )
    classifier_rounds: int = setting(
        10, "FedICON: rounds of the classifier on the frozen encoder", low=0, group="training"
    )
    classifier_epochs: int = setting(
        5, "FedICON: epochs that personalize the final classifier", low=0, group="training"
    )

    # Federation
    rounds: int = setting(10, "training rounds", low=0, group="training")
    aggregation: str = setting(
        "fedavg",
        "server aggregation (fedavg, fedprox, ...); fedmedian, fedtrimmedavg, krum, multikrum are Byzantine-robust",
        group="aggregation",
    )
    proximal_mu: float = setting(0.01, "FedProx: μ of the pull towards the received model", low=0, group="aggregation")
    server_momentum: float = setting(0.9, "FedAvgM: momentum of the server", low=0, high=0.9999, group="aggregation")
    mask_threshold: float = setting(
        0.1, "GMA: agreement from which a value moves in full", low=0, high=1, group="aggregation"
    )
    fairness: float = setting(1.0, "q-FFL: q, extra weight of clients with a large loss", low=0, group="aggregation")
    trim_fraction: float = setting(
        0.2, "fedtrimmedavg: fraction of the clients trimmed at each end", above=0, high=0.4999, group="aggregation"
    )
    krum_malicious: int = setting(
        1, "krum, multikrum: number of Byzantine clients to tolerate", low=1, group="aggregation"
    )
    krum_keep: int = setting(3, "multikrum: number of clients that are averaged", low=1, group="aggregation")
    fraction_train: float = setting(
        1.0, "fraction of clients sampled per round", above=0, high=1, group="aggregation", published=(1.0,)
    )
    statistics_weighting: str = setting(
        "uniform", "how client statistics are averaged", choices=("uniform", "examples"), group="evaluation"
    )
    leave_one_out: bool = setting(
        False, "BTFL: exclude the client's own share from the global DLE", group=("evaluation", "adapter")
    )
    min_clients: int = setting(
        0, "begin with this many clients if node-timeout has passed (0: clients)", low=0, group="availability"
    )
    max_clients: int = setting(
        0, "most clients of a deployment, with those that join later (0: no limit)", low=0, group="availability"
    )
    node_timeout: float = setting(
        300.0,
        "seconds to wait for all clients at the start, or for enough of them later",
        above=0,
        group="availability",
    )
    round_timeout: float = setting(
        3600.0,
        "seconds a round may take; with secure aggregation, each of its three exchanges",
        above=0,
        group="availability",
    )
    min_replies: int = setting(
        1,
        "valid replies that a round needs (all, if fewer clients are asked); with fewer it is repeated once",
        low=1,
        group="availability",
    )
    update_format: str = setting(
        "float32",
        "how trained models travel to the server: float32 (all of them), changed (arrays that changed), float16 or "
        "int8 (rounded differences, with error feedback)",
        choices=("float32", "changed", "float16", "int8"),
        group="aggregation",
    )
    update_norm_bound: float = setting(
        0.0,
        "refuse a model or rates further than this (l2 norm) from what was sent (0: no bound)",
        low=0,
        group="aggregation",
    )
    clip_factor: float = setting(
        3.0,
        "limit what is further from the clients' median than this many times the median distance, or against the "
        "median step of the others (0: off; Byzantine-robust aggregations do without)",
        low=0,
        group="aggregation",
    )
    max_share: float = setting(
        3.0,
        "a client counts in means as at most this many times the samples of the median client (0: no limit)",
        low=0,
        group="aggregation",
    )
    max_examples: int = setting(100_000_000, "refuse a client that claims more examples", low=1, group="aggregation")

    # Privacy
    secure_aggregation: bool = setting(
        False, "the server learns sums of models, statistics and rates, and no client's own", group="privacy"
    )
    secure_threshold: float = setting(
        0.67,
        "secure aggregation: part of the clients that must reply; as many of them could read the others' replies",
        above=0.5,
        high=1,
        group="privacy",
    )
    secure_neighbours: int = setting(
        0, "secure aggregation: others that a client shares masks with (SecAgg+; 0: all)", low=0, group="privacy"
    )
    differential_privacy: str = setting(
        "",
        "clipping and noise on the clients, z/clip for each: 'statistics=2/0.25;model=4/1;rates=2/0.1;delta=1e-5'; "
        "empty: none",
        group="privacy",
    )

    # Learning adaptation rates (ATP)
    rates_rounds: int = setting(
        20, "rounds that learn adaptation rates, for methods that need them", low=0, group="rates"
    )
    rates_clients: int = setting(0, "clients sampled per round of rates (0: all that train)", low=0, group="rates")
    rates_epochs: int = setting(1, "local epochs over the validation split per round of rates", low=1, group="rates")
    rates_batch_size: int = setting(20, "batch size when rates are refined", low=1, group="rates")
    rates_learning_rate: float = setting(
        0.1, "learning rate of the rates (the paper: 0.1, or 0.5)", above=0, group="rates"
    )
    adapt_batch_size: int = setting(20, "test-time batch of methods defined per batch", low=1, group="evaluation")
    rates_init: str = setting("", "file of learned rates to start from instead of zeros", group=("rates", "paths"))

    # Test-time rounds in which clients help each other
    collaborations: str = setting(
        "",
        "how clients collaborate at test time, e.g. 'none,fedavg,pfedbbn[temperature=1]'; empty: no test-time rounds",
        group="collaboration",
        published=("",),
    )
    share: str = setting(
        "all", "what clients share in test-time rounds", choices=("affine", "statistics", "all"), group="collaboration"
    )
    stream_mix: str = setting(
        "dirichlet", "class mix of a client's stream", choices=("dirichlet", "iid", "published"), group="streams"
    )
    stream_concentration: float = setting(0.01, "Dirichlet concentration of the class mix", above=0, group="streams")
    stream_size: int = setting(1000, "images of a client, repeated under each corruption", low=1, group="streams")
    stream_batch: int = setting(200, "images of a client per round", low=1, group="streams")
    stream_order: str = setting(
        "auto",
        "order of the images; auto: shuffled for iid, else by class; own data: shuffled, or sorted by name",
        choices=("auto", "sorted", "shuffled"),
        group="streams",
    )
    stream_orders: int = setting(
        0,
        "number of different orders of corruptions, shared by the clients (0: one per client)",
        low=0,
        group="streams",
    )
    stream_rounds: int = setting(0, "test-time rounds (0: to the end of the streams)", low=0, group="collaboration")

    # Where it runs
    device: str = setting(
        "auto",
        "auto (GPUs if there are any), cpu, cuda or cuda:<index>, which counts in CUDA_VISIBLE_DEVICES if that is set",
        group=("execution", "node"),
    )
    deterministic: bool = setting(
        False,
        "same bits in every run on a GPU, with slower algorithms and without TF32; on a CPU it is always so",
        group="execution",
    )
    autocast: bool = setting(
        False,
        "bfloat16 autocast in local training: faster where the processor has instructions for it, far slower elsewhere",
        group="training",
    )
    engine: str = setting(
        "auto",
        "what simulates clients: ray (workers that share arrays), flower (Flower's own simulation), vectorised (one "
        "process that trains many networks at once), auto (ray; vectorised where all training can be stacked on a GPU)",
        choices=("auto", "ray", "flower", "vectorised"),
        group="execution",
    )
    ray_address: str = setting(
        "",
        "ray: the cluster to run on: auto (the one on this machine), HOST:PORT, ray://HOST:PORT, or local (none, this "
        "machine alone); empty: the environment variable RAY_ADDRESS, or local",
        group="execution",
    )
    workers: int = setting(2, "ray, flower: simulated clients that run at once", low=1, group="execution")
    stacked_clients: int = setting(
        0, "vectorised: the most clients that train at once (0: 50 on a GPU, 1 on a CPU)", low=0, group="execution"
    )
    num_gpus: float = setting(
        0.0,
        "ray, flower: each worker's share of a GPU (0: workers are spread evenly over the GPUs of this machine; on a "
        "cluster: none)",
        low=0,
        group="execution",
    )
    eval_batch_size: int = setting(256, "batch of statistics and test streams", low=1, group=("evaluation", "adapter"))
    state_dir: str = setting(
        "",
        "folder for clients' private state; empty: Flower's context, which ends with the run",
        group=("storage", "node", "paths"),
    )
    results: str = setting("results", "folder of run folders", group=("storage", "paths"))
    run_name: str = setting("", "name of the run folder; empty: data set, seed and time", group="storage")
    checkpoint_every: int = setting(1, "rounds between two checkpoints (0: no checkpoints)", low=0, group="storage")
    checkpoints_kept: int = setting(2, "number of checkpoints kept", low=1, group="storage")
    resume: str = setting(
        "",
        "run folder, or checkpoint file in it, to resume, with its other settings; clients need state-dir",
        group=("storage", "paths"),
    )

    # How it is followed
    track: str = setting(
        "", "trackers that get the run's numbers: tensorboard, mlflow, wandb, separated by commas", group="observation"
    )
    log_format: str = setting(
        "text", "lines on stderr: progress and text for people, or json for programs", FORMATS, group="observation"
    )
    log_level: str = setting("info", "least level of the log's lines on stderr", LEVELS, group="observation")
    observe_every: float = setting(
        0.0, "seconds between two questions how the devices are, in devices.jsonl (0: none)", low=0, group="observation"
    )
    observe_only: bool = setting(
        False, "ask the devices how they are until the run is stopped, and train nothing", group="observation"
    )

    def __post_init__(self) -> None:
        """Check every field."""
        check_fields(self)
        check_device(self.device)
        if not RAY_ADDRESS.fullmatch(self.ray_address):
            raise SettingsError(
                f"ray-address = {self.ray_address!r}: allowed are auto, local, HOST:PORT and ray://HOST:PORT, or none"
            )
        if self.momentum and self.optimizer != "sgd":
            raise SettingsError(f"momentum = {self.momentum}: allowed with optimizer = 'sgd' only")
        if self.leave_one_out and self.statistics_weighting != "uniform":
            raise SettingsError("leave-one-out = True: allowed with statistics-weighting = 'uniform' only")
        if "unseen_domain" in self.shifts.lower().replace(" ", "").split(",") and not self.unseen_domain:
            raise SettingsError(f"shifts = {self.shifts!r}: unseen_domain needs unseen-domain = '<domain>'")
        for field in dataclasses.fields(self) if self.split == "published" else ():
            allowed, value = field.metadata["published"], getattr(self, field.name)
            if allowed is not None and value not in allowed:
                words = " or ".join(repr(one) for one in allowed)
                raise SettingsError(f"{key_of(field.name)} = {value!r}: allowed with split = 'published' is {words}")
        if not self.devices:  # else their files are counted first
            self.check_clients()
        if self.observe_only and not self.observe_every:
            raise SettingsError("observe-every = 0.0: allowed with observe-only = True is more than 0")
        if self.observe_only and self.resume:
            raise SettingsError(f"resume = {self.resume!r}: allowed with observe-only = True is none")
        if self.channels == 2:
            raise SettingsError("channels = 2: allowed are 1, 3")
        named = self.run_name
        if "/" in named or named in (".", "..") or not named.isprintable() or len(named.encode()) > RUN_NAME_BYTES:
            raise SettingsError(
                f"run-name = {named!r}: allowed is a plain folder name of at most {RUN_NAME_BYTES} bytes"
            )

    def check_clients(self) -> None:
        """Raise SettingsError where `clients` does not fit another number of clients or replies, or leave-one-out."""
        if self.min_replies > max(self.clients, self.max_clients):
            limit = f"max-clients = {self.max_clients}" if self.max_clients else f"clients = {self.clients}"
            raise SettingsError(f"min-replies = {self.min_replies}: allowed is at most {limit}")
        if self.min_clients > self.clients:
            raise SettingsError(f"min-clients = {self.min_clients}: allowed is at most clients = {self.clients}")
        if self.max_clients and self.max_clients < self.clients:
            raise SettingsError(f"max-clients = {self.max_clients}: allowed is at least clients = {self.clients}, or 0")
        if self.leave_one_out and self.clients == 1:
            raise SettingsError("leave-one-out = True: allowed with clients = 2 or more")

    def replace(self, **changes: Any) -> Settings:
        """Return a validated copy with some fields changed (Python names)."""
        return dataclasses.replace(self, **changes)

    def flat(self) -> dict[str, Scalar]:
        """Return key → value with hyphens, as Flower's configs and TOML files carry it."""
        return {key: getattr(self, field.name) for key, field in fields_by_key().items()}

    def select(self, *groups: str) -> dict[str, Scalar]:
        """Return key → value of the settings in any of these groups, in the schema's order.

        Raises
        ------
        ValueError
            There is no such group.
        """
        fields = fields_by_key()
        return {key: getattr(self, fields[key].name) for key in keys_in(*groups)}


@cache
def fields_by_key() -> dict[str, dataclasses.Field[Any]]:
    """Return key → dataclass field of every setting."""
    return {key_of(field.name): field for field in dataclasses.fields(Settings)}


@cache
def keys_in(*groups: str) -> tuple[str, ...]:
    """Return the keys of the settings in any of these groups, in the schema's order.

    Raises
    ------
    ValueError
        There is no such group.
    """
    if unknown := set(groups) - set(GROUPS):
        raise ValueError(f"unknown groups {sorted(unknown)}; there are: {', '.join(GROUPS)}")
    return tuple(key for key, field in fields_by_key().items() if set(field.metadata["groups"]) & set(groups))


def check_device(device: str) -> None:
    """Raise SettingsError unless a device is one of those that `device` may be."""
    if not DEVICE.fullmatch(device):
        raise SettingsError(f"device = {device!r}: allowed are auto, cpu, cuda, cuda:<index>")


def exactly(value: float) -> Fraction:
    """Return a number as the decimal that was written: in floats 0.55 of 100 is more than 55."""
    return Fraction(str(value))
