"""The owner's policy: what a device does for a run, and what it refuses whatever the server asks.

It is the table `[policy]` of `device.toml`. The agent's process enforces it before a message's data, paths or network
are touched; code that the server sends runs in another process and cannot change it. What is not listed here, a run
decides. Data and paths are not rules: a device with data of its own ignores a run's data set, and every path in a
message is ignored on every device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedtta.messages.requests import (
    REQUESTS,
    Adapt,
    AdapterRow,
    Evaluate,
    Identify,
    RefineRates,
    Request,
    ShareKeys,
    Summarize,
    Train,
    TrainingTask,
    Unmask,
)
from fedtta.privacy.gaussian import Privacy
from fedtta.settings import Settings, SettingsError, assignments
from fedtta.settings.fields import by_field, check_fields, setting

ANY = "*"  # a list of names that has everything
BUILT_IN = "built-in"  # stands for the networks of this package
MIB = 1 << 20
SETTINGS_BYTES = 1 << 20  # of a message's settings as text: the classes' names are the longest
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
#: Names in the folder of private states that no run may have.
RESERVED = ("networks",)
FORGOTTEN = ".forgotten"
#: Arguments of a network that follow from other settings: as options they would replace what has been checked.
DERIVED = ("name", "num_classes", "in_channels", "image_size", "preprocessing", "classes")
LARGEST_OPTION = 256  # of an adapter's whole numbers, such as views and steps
EPOCHS = "-epochs"  # ends the keys of settings that say how long something is trained


class PolicyError(ValueError):
    """A message asks for more than the owner allows.

    Parameters
    ----------
    rule : str
        Key of the rule in `[policy]`.
    asked, allowed : str
    """

    def __init__(self, rule: str, asked: str, allowed: str) -> None:
        super().__init__(f"policy {rule}: {asked}; allowed is {allowed}")
        self.rule = rule


def phase_of(kind: str) -> str:
    """Return the short name of a kind of request: identify, train, statistics, observe and so on."""
    return kind.rpartition(".")[2]


@dataclass(frozen=True)
class Policy:
    """The rules of one device, validated on construction; a key is the field's name with hyphens.

    A list of names is separated by commas; `*` stands for everything, an empty text for nothing.

    Raises
    ------
    SettingsError
        A value has the wrong type or lies outside what is allowed; the message names the key.
    """

    # What is computed
    phases: str = setting(
        "identify,train,statistics,rates,evaluate,share_keys,unmask,observe",
        "kinds of messages; adapt, a test-time round, tells the class counts of every batch; observe tells telemetry",
    )
    algorithms: str = setting(ANY, "local algorithms of trainings")
    objectives: str = setting(ANY, "losses of trainings")
    adapters: str = setting(ANY, "adapters that may be evaluated")
    models: str = setting(
        "built-in,timm,torchvision", "networks: these libraries, and names such as 'my_package.nets:make'"
    )

    # On what
    datasets: str = setting("digits", "data sets of a run, for a device without data of its own")
    dataset_options: str = setting("", "the options of the data set that a run may name, as one text; *: any")
    download: bool = setting(False, "whether a run's data set may be downloaded")
    least_train_part: float = setting(
        1.0, "least train-part of a run: two runs that differ by a sample tell that sample", low=0, high=1
    )

    # What leaves
    statistics: str = setting(
        "block_scores", "statistics that are sent on request; label_prior and confusion tell the class mix"
    )
    least_samples: int = setting(8, "least samples behind a trained model, statistics or rates", low=1)
    least_effective_samples: float = setting(
        4.0,
        "least (Σ c)² / Σ c² of an update, for the samples' contributions c under the received weights; 1: no check",
        low=1,
    )
    least_active_share: float = setting(
        0.5, "the same for the features of an image, as a share of the samples; 0: no check", low=0, high=1
    )
    least_batch_size: int = setting(8, "least samples of a batch: smaller last ones are left out", low=1)
    least_clients: int = setting(
        2, "least clients of a run, as the server states them, and least members left in a secure sum", low=1
    )
    secure_aggregation: bool = setting(
        False, "whether models, statistics and rates leave under the masks of a secure sum only"
    )
    least_noise: float = setting(
        0.0, "least z of differential privacy's noise on models, statistics and rates; 0: none is asked for", low=0
    )
    count_step: int = setting(
        5, "counts of right predictions are rounded to a multiple of it; 1: exact, which can tell labels", low=1
    )

    # How much
    most_epochs: int = setting(100, "most epochs of each kind in a message", low=1)
    most_seconds: float = setting(3600.0, "most seconds of work on a message", above=0)
    most_memory_mb: int = setting(4096, "most memory of a message's work, MiB, as estimated", low=1)
    most_image_size: int = setting(256, "largest edge of the network's images", low=8)
    most_message_mb: int = setting(512, "largest message, MiB", low=1, high=1024)
    messages_per_hour: int = setting(3600, "most messages that are worked on in an hour", low=1)
    evaluations_per_day: int = setting(100, "most evaluations in 24 hours", low=1)

    # What is kept
    most_runs: int = setting(64, "most runs with private state; a further one is refused", low=1)
    least_days_kept: float = setting(7.0, "days for which a run's private state is not removed for others", low=0)
    most_state_mb: int = setting(4096, "most private state of all runs, MiB", low=1)

    # What is served
    serve: str = setting(
        "checked",
        "new models: never; checked, where one that cannot be compared with the served one waits for approval; any, "
        "where it is served",
        ("never", "checked", "any"),
    )

    def __post_init__(self) -> None:
        """Check every key."""
        check_fields(self)
        known = [phase_of(kind) for kind in REQUESTS]
        if unknown := sorted(_names(self.phases) - {*known, ANY}):
            raise SettingsError(f"phases = {self.phases!r}: there is no {unknown[0]}; allowed are {', '.join(known)}")

    @classmethod
    def from_mapping(cls, content: Mapping[str, Any]) -> Policy:
        """Build a policy from hyphenated keys; SettingsError names an unknown one."""
        try:
            return cls(**by_field(cls, content))
        except SettingsError as error:
            raise SettingsError(f"policy: {error}") from error

    def check_kind(self, kind: str, size: int) -> None:
        """Refuse a message by its kind and its size in bytes, before it is read.

        Raises
        ------
        PolicyError
        """
        if not _has(self.phases, phase := phase_of(kind)):
            raise PolicyError("phases", phase, self.phases or "none")
        if size > self.most_message_mb * MIB:
            raise PolicyError("most-message-mb", f"{size / MIB:.0f} MiB", f"at most {self.most_message_mb}")

    def check_names(self, request: Request) -> None:
        """Refuse names that could not be those of files.

        Raises
        ------
        PolicyError
        """
        task: TrainingTask | None = getattr(request, "task", None)
        names = {"run": request.run, "training": task.training if task else "t"}
        names |= {what: getattr(request, what) for what in ("cell", "network") if hasattr(request, what)}
        for what, name in names.items():
            if not NAME.fullmatch(name) or (what == "run" and (name in RESERVED or name.endswith(FORGOTTEN))):
                raise PolicyError("names", f"{what} {name[:40]!r}", "a plain name of at most 128 characters")

    def rounded(self, count: int, total: int) -> int:
        """Return a count of right predictions as it may leave: a multiple of `count-step`, at most `total`."""
        return min(total, (2 * count + self.count_step) // (2 * self.count_step) * self.count_step)

    def check_request(self, request: Request, settings: Settings, own_data: bool) -> None:
        """Refuse a request by what it says, before anything of it is done.

        Parameters
        ----------
        settings : Settings
            Its settings, with those that the device overrides.
        own_data : bool
            Whether the device has data of its own.

        Raises
        ------
        PolicyError
            It is beyond a rule.
        ValueError
            Its network, an option or an adapter does not exist.
        """
        self._check_run(request, settings)
        if not own_data:
            self._check_division(settings)
        self._check_network(settings)
        self._check_training(request, settings)
        self._check_statistics(request, settings)
        self._check_hidden(request, settings)
        rows = _rows(request)
        self._check_rows(rows)
        self._check_memory(settings, rows, own_data)

    def check_samples(self, request: Request, training: int, validation: int) -> None:
        """Refuse what too few samples would stand behind.

        Parameters
        ----------
        training, validation : int
            Samples of the splits; 0 training samples for a client that only tests.

        Raises
        ------
        PolicyError
        """
        least = max(self.least_samples, self.least_batch_size)
        what = phase_of(request.kind)
        behind = {"train": training, "statistics": training, "rates": validation}.get(what)
        if what == "identify" and training:
            behind = training
        if behind is not None and behind < least:
            kind = "validation" if what == "rates" else "training"
            raise PolicyError("least-samples", f"{behind} {kind} samples", f"{least} or more")

    @property
    def weighs_samples(self) -> bool:
        """Return whether `check_effective` can refuse anything."""
        return self.least_effective_samples > 1 or self.least_active_share > 0

    def check_effective(self, request: Request, effective: float, share: float) -> None:
        """Refuse weights under which a few samples make a reply; see `fedtta.client.statistics.effective_samples`.

        Raises
        ------
        PolicyError
        """
        least, least_share = self.least_effective_samples, self.least_active_share
        if isinstance(request, Train) and least > 1 and not effective >= least:  # NaN: the weights are no numbers
            raise PolicyError(
                "least-effective-samples", f"{effective:.1f} samples make the update", f"{least:g} or more"
            )
        if least_share > 0 and not share >= least_share:
            raise PolicyError(
                "least-active-share", f"{share:.1%} of the samples make the features", f"{least_share:.0%}"
            )

    def _check_run(self, request: Request, settings: Settings) -> None:
        self.check_names(request)
        if settings.clients < self.least_clients:
            raise PolicyError("least-clients", f"clients = {settings.clients}", f"{self.least_clients} or more")
        if settings.collaborations and not _has(self.phases, "adapt"):
            raise PolicyError("phases", f"collaborations = {settings.collaborations!r} needs adapt", self.phases)

    def _check_division(self, settings: Settings) -> None:
        """Refuse a data set to divide that the owner has not named."""
        if not _has(self.datasets, settings.dataset):
            raise PolicyError("datasets", f"dataset = {settings.dataset!r}", self.datasets or "none")
        if self.dataset_options != ANY and settings.dataset_options != self.dataset_options:
            raise PolicyError(
                "dataset-options",
                f"dataset-options = {settings.dataset_options!r}",
                self.dataset_options or "none: options can name folders",
            )
        if settings.train_part < self.least_train_part:
            raise PolicyError(
                "least-train-part", f"train-part = {settings.train_part:g}", f"{self.least_train_part:g} or more"
            )

    def _check_network(self, settings: Settings) -> None:
        library, colon, _ = settings.model.partition(":")
        if not (_has(self.models, settings.model) or _has(self.models, library if colon else BUILT_IN)):
            raise PolicyError("models", f"model = {settings.model!r}", self.models or "none")
        options = assignments(settings.model_options, "model-options")
        if derived := [name for name in DERIVED if name in options]:
            raise PolicyError("models", f"model-options: {derived[0]}", "what other settings do not decide")
        texts = [name for name, value in options.items() if isinstance(value, str)]
        if colon and (texts := [name for name in texts if name not in ("pretrained", "weights", "features")]):
            raise PolicyError("models", f"model-options: {texts[0]} is a text", "numbers: a text can name a file")
        if settings.image_size > self.most_image_size:
            raise PolicyError("most-image-size", f"image-size = {settings.image_size}", f"{self.most_image_size}")

    def _check_training(self, request: Request, settings: Settings) -> None:
        flat: dict[str, Any] = dict(settings.flat())
        for key in (one for one in flat if one.endswith(EPOCHS)):
            if flat[key] > self.most_epochs:
                raise PolicyError("most-epochs", f"{key} = {flat[key]}", f"at most {self.most_epochs}")
        batches = ["batch-size", *(["stream-batch"] if isinstance(request, Adapt) else [])]
        for key in batches:
            if flat[key] < self.least_batch_size:
                raise PolicyError("least-batch-size", f"{key} = {flat[key]}", f"{self.least_batch_size} or more")
        task: TrainingTask | None = getattr(request, "task", None)
        if task is not None:
            for rule, name in (("algorithms", task.algorithm), ("objectives", task.objective)):
                if not _has(getattr(self, rule), name):
                    raise PolicyError(rule, name[:80], getattr(self, rule) or "none")

    def _check_statistics(self, request: Request, settings: Settings) -> None:
        """Refuse statistics that the owner does not send, or that no method of the run needs."""
        needed = statistics_of(settings.methods)
        wanted = set(request.wanted) if isinstance(request, Summarize) else set()
        asked = needed | wanted if isinstance(request, Identify | Train) else wanted
        if unneeded := sorted(wanted - needed):
            raise PolicyError("statistics", f"{unneeded[0][:80]}, which no method of the run needs", "what is needed")
        if foreign := sorted(name for name in asked if not _has(self.statistics, name)):
            raise PolicyError("statistics", foreign[0], self.statistics or "none")

    def _check_hidden(self, request: Request, settings: Settings) -> None:
        """Refuse what would leave without masks or noise where the owner wants them, and a secure sum of too few."""
        asked = request if isinstance(request, ShareKeys) else getattr(request, "masking", None)
        left = request.survivors if isinstance(request, Unmask) else asked.members if asked else None
        if left is not None and len(set(left)) < self.least_clients:
            raise PolicyError("least-clients", f"a secure sum of {len(set(left))}", f"{self.least_clients} or more")
        sends = isinstance(request, Train | Summarize | RefineRates | Adapt)
        if self.secure_aggregation and not settings.secure_aggregation and (sends or isinstance(request, Identify)):
            raise PolicyError("secure-aggregation", "secure-aggregation = false", "true")
        if self.secure_aggregation and sends and asked is None:
            raise PolicyError("secure-aggregation", f"{phase_of(request.kind)} without masks", "a secure sum")
        if self.least_noise and sends:
            what = "model" if isinstance(request, Train) else phase_of(request.kind)
            mechanism = Privacy.parse(settings.differential_privacy).mechanisms.get(what)
            if (noise := mechanism.noise if mechanism else 0.0) < self.least_noise:
                raise PolicyError("least-noise", f"z = {noise:g} on {what}", f"{self.least_noise:g} or more")

    def _check_rows(self, rows: Sequence[AdapterRow]) -> None:
        from fedtta.tta.registry import candidates_of

        for row in rows:
            for name in (row.adapter, *candidates_of(row.adapter, row.options)):
                if not _has(self.adapters, name):
                    raise PolicyError("adapters", name[:80], self.adapters or "none")
            for name, value in row.options.items():
                if isinstance(value, int) and name != "seed" and abs(value) > LARGEST_OPTION:
                    raise PolicyError("adapters", f"{row.adapter}[{name}={value}]", f"at most {LARGEST_OPTION}")

    def _check_memory(self, settings: Settings, rows: Sequence[AdapterRow], own_data: bool) -> None:
        from fedtta.client.footprint import memory  # needs torch, which reading a config does not

        estimate = memory(settings, rows, own_data) / MIB
        if estimate > self.most_memory_mb:
            raise PolicyError("most-memory-mb", f"about {estimate:.0f} MiB", f"{self.most_memory_mb}")


def statistics_of(methods: str) -> set[str]:
    """Return the statistics on request that methods of a run need; those methods have the names of their adapters.

    So do the candidates of a method that chooses among others.
    """
    from fedtta.tta.registry import ADAPTERS
    from fedtta.tta.statistics import STATISTICS

    candidates = {name for listed in re.findall(r"among=([\w+]*)", methods) for name in listed.split("+")}
    plain = methods
    while plain != (shorter := re.sub(r"\[[^\[\]]*\]", "", plain)):
        plain = shorter
    named = candidates | {name.strip() for name in plain.split(",")}
    chosen = [ADAPTERS[name] for name in ADAPTERS if name in named or "all" in named]
    needs = frozenset[str]().union(*(adapter.needs for adapter in chosen))
    return {name for name, statistic in STATISTICS.items() if statistic.on_request and statistic.need in needs}


def _rows(request: Request) -> Sequence[AdapterRow]:
    if isinstance(request, Evaluate):
        return request.rows
    return [request.row] if isinstance(request, Adapt) else []


def _names(text: str) -> set[str]:
    """Return the names of a list."""
    return {name.strip() for name in text.split(",") if name.strip()}


def _has(text: str, name: str) -> bool:
    """Return whether a list has a name."""
    return name in (names := _names(text)) or ANY in names
