"""Fabricated runs, as a server writes them, and a parser of pages."""

from __future__ import annotations

import itertools
import json
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from fedtta.server.report import WEIGHT_BINS, Results, read_results
from fedtta.server.report.page import write_report

SHIFTS = ["original", "corrupted", "natural", "out_of_client", "mixture"]
METHODS = {
    "none": ("cross_entropy", [0.62, 0.41, 0.48, 0.60, 0.52]),
    "personal": ("cross_entropy", [0.86, 0.70, 0.74, 0.14, 0.61]),
    "fixed_mix": ("cross_entropy", [0.84, 0.69, 0.73, 0.30, 0.64]),
    "btfl": ("cross_entropy", [0.85, 0.70, 0.74, 0.38, 0.68]),
    "fedthe": ("balanced_softmax", [0.84, 0.69, 0.72, 0.42, 0.67]),
    "fedthe_plus": ("balanced_softmax", [0.86, 0.73, 0.74, 0.43, 0.70]),
}


def evaluation(method: str, shift: str, partition: int, correct: int, total: int, **more: Any) -> dict[str, Any]:
    accuracy = correct / total if total else None
    return {
        "event": "evaluation", "training": "cross_entropy", "method": method, "shift": shift,
        "partition": partition, "correct": correct, "total": total, "accuracy": accuracy, "weight_histogram": None,
        "weight_mean": None,
        "seconds": 0.5, **more,
    }  # fmt: skip


def training_round(training: str, number: int, **more: Any) -> dict[str, Any]:
    return {
        "event": "round", "training": training, "round": number, "sampled": [0, 1], "replied": [0, 1],
        "train_loss": 1.0, "validation_accuracy": 0.5, "personal_validation_accuracy": None,
        "train_seconds": [2.0, 1.0], "wall_seconds": 2.5, "bytes_up": 1000, "bytes_down": 1000, **more,
    }  # fmt: skip


def whole_run(clients: int = 10, rounds: int = 8, classes: int = 10) -> list[dict[str, Any]]:
    """Events of a plausible whole run: two trainings, six methods, five distributions, some incidents."""
    rng = random.Random(7)
    generator = np.random.default_rng(7)
    shares = generator.dirichlet([0.3] * classes, size=clients)
    counts = [[int(n) for n in generator.multinomial(180, share)] for share in shares]
    settings = {
        "seed": 1, "methods": ",".join(METHODS), "shifts": "brfl", "severity": 5, "dataset": "digits",
        "clients": clients, "partition": "dirichlet", "alpha": 0.3, "model": "cnn", "local_epochs": 5,
        "batch_size": 32, "learning_rate": 0.01, "weight_decay": 5e-4, "rounds": rounds, "workers": 2,
        "init": "",
    }  # fmt: skip
    versions = {"python": "3.11.7", "torch": "2.7.0", "flwr": "1.39.0"}
    events: list[dict[str, Any]] = [
        {"event": "run", "time": "2026-11-21T10:00:00Z", "settings": settings, "versions": versions,
         "commit": "3f2c1ab", "hardware": "2 cores, 8 GiB memory, no GPU"},
        {"event": "clients", "class_counts": counts, "classes": [str(c) for c in range(classes)],
         "sizes": [[108, 36, 36]] * clients},
    ]  # fmt: skip
    for training, offset in (("cross_entropy", 0.0), ("balanced_softmax", 0.03)):
        for number in range(1, rounds + 1):
            progress = 1 - 0.75 ** (number - 1)
            events.append(training_round(
                training, number, sampled=list(range(clients)), replied=list(range(clients)),
                train_loss=2.2 * 0.8**number + 0.3 + offset, wall_seconds=4.0 + rng.random(),
                validation_accuracy=0.1 + (0.55 - offset) * progress,
                bytes_up=2_300_000, bytes_down=2_300_000,
                personal_validation_accuracy=0.6 + 0.26 * progress,
                train_seconds=[0.7 + 0.1 * rng.random() for _ in range(clients)],
            ))  # fmt: skip
    events += [
        {"event": "refused", "training": "cross_entropy", "round": 3, "partition": 4, "node_id": 92233720,
         "reason": "array 'head.weight' has values that are not finite"},
        {"event": "failed", "training": "balanced_softmax", "round": 5, "partition": 1, "node_id": 7,
         "reason": "RuntimeError: the client stopped in the middle of local training"},
        {"event": "leak_check", "training": "cross_entropy", "checked": 1234, "leaked": 0},
        {"event": "note", "text": "natural: CIFAR-10.1 is not present; a held-out writer set was used"},
    ]  # fmt: skip
    events += _evaluations(clients, rng, generator)
    return [*events, {"event": "end", "seconds": 123.4, "status": "completed"}]


def _evaluations(clients: int, rng: random.Random, generator: np.random.Generator) -> list[dict[str, Any]]:
    events = []
    for method, (training, accuracies) in METHODS.items():
        for shift, accuracy in zip(SHIFTS, accuracies, strict=True):
            for partition in range(clients):
                correct = round(60 * min(1.0, max(0.0, accuracy + rng.gauss(0, 0.08))))
                more: dict[str, Any] = {"training": training}
                if method.startswith(("btfl", "fedthe")):
                    high = 6 if shift == "out_of_client" else 2
                    weights = generator.beta(high, 4, size=60)
                    more["weight_histogram"] = np.histogram(weights, WEIGHT_BINS, (0, 1))[0].tolist()
                    more["weight_mean"] = float(weights.mean())
                events.append(evaluation(method, shift, partition, correct, 60, **more))
    return events


def write_events(folder: Path, events: list[Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [event if isinstance(event, str) else json.dumps(event, ensure_ascii=False) for event in events]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def results_of(tmp_path: Path, events: list[Any]) -> Results:
    return read_results(write_events(tmp_path / "run", events) / "metrics.jsonl")


def page_of(tmp_path: Path, events: list[Any], name: str = "digits-1") -> str:
    return write_report(write_events(tmp_path / name, events)).read_text(encoding="utf-8")


CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
#: Samples of each class of the ten clients; class 3 does not occur.
MIX = (
    {0: 1000}, {0: 266, 4: 2, 5: 447, 8: 285}, {0: 96, 8: 904}, {4: 853, 5: 10, 8: 136, 9: 1}, {6: 1000},
    {2: 399, 8: 1, 9: 600}, {7: 1000}, {8: 1000}, {9: 1000}, {1: 5, 2: 68, 6: 927},
)  # fmt: skip
ADAPTERS = {"tent": 0.30, "cotta": 0.35, "bbn": 0.55}
COLLABORATIONS = {"none": 0.0, "fedavg": 0.12, "pfedbbn[share=statistics]": 0.15}


def layer_sizes() -> dict[str, int]:
    """Modules of a shallow CNN with BatchNorm and how many values they have, in order of definition."""
    sizes: dict[str, int] = {}
    for index, (weights, maps) in enumerate(((864, 32), (18432, 64), (36864, 64)), start=1):
        sizes[f"encoder.body.conv{index}.weight"] = weights
        for tensor in ("weight", "bias", "running_mean", "running_var"):
            sizes[f"encoder.body.norm{index}.{tensor}"] = maps
    sizes |= {"encoder.body.fc4.weight": 65536, "encoder.body.fc4.bias": 64}
    sizes |= {f"encoder.body.norm4.{tensor}": 64 for tensor in ("weight", "bias", "running_mean", "running_var")}
    return sizes | {"head.weight": 640, "head.bias": 10}


def rates_round(number: int, variant: str = "all", **more: Any) -> dict[str, Any]:
    return {
        "event": "rates_round", "training": "cross_entropy", "variant": variant, "round": number, "sampled": [0, 1],
        "replied": [0, 1], "loss": 1.5, "accuracy": 0.5, "wall_seconds": 2.0, "bytes_down": 368, "bytes_up": 368,
        "context_bytes": 0, **more,
    }  # fmt: skip


def rates(values: dict[str, float], sizes: dict[str, int], variant: str = "all", **more: Any) -> dict[str, Any]:
    return {
        "event": "rates", "training": "cross_entropy", "variant": variant, "rates": values, "sizes": sizes, **more
    }  # fmt: skip


def adapt_round(number: int, weights: list[list[float]], **more: Any) -> dict[str, Any]:
    return {
        "event": "adapt_round", "method": "bbn", "collaboration": "pfedbbn", "round": number,
        "replied": list(range(len(weights))), "weights": weights, "wall_seconds": 3.0, "bytes_down": 400_000,
        "bytes_up": 400_000, "context_bytes": 0, **more,
    }  # fmt: skip


def adapted(number: int, partition: int, correct: list[int], total: list[int], **more: Any) -> dict[str, Any]:
    return {
        "event": "adapted", "method": "bbn", "collaboration": "pfedbbn", "round": number, "partition": partition,
        "corruption": "fog", "correct": correct, "total": total, "seconds": 0.5, **more,
    }  # fmt: skip


def learned_rates(rounds: int = 50) -> list[dict[str, Any]]:
    """Rates of three variants; those of the statistics grow faster than those of the parameters."""
    generator = np.random.default_rng(3)
    sizes = layer_sizes()
    events = []
    for variant, gain in (("all", 0.25), ("params", 0.1), ("stats", 0.2)):
        for number in range(1, rounds + 1):
            progress = 1 - 0.9**number
            loss = 1.9 - 2.5 * gain * progress + 0.04 * generator.normal()
            accuracy = 0.4 + gain * progress + 0.01 * generator.normal()
            down = 3_696 if number > 1 else 5_000_000  # the network travels once
            events.append(rates_round(number, variant, loss=loss, accuracy=accuracy, bytes_down=down))
        values = {}
        for name in sizes:
            running = "running" in name
            moved = variant == "all" or (variant == "stats") == running
            values[name] = float(generator.normal(0.3 if running else 0.1, 0.15)) if moved else 0.0
        events.append(rates(values, sizes, variant))
    return events


def adapting_together(
    rounds: int = 75, corruptions: tuple[str, ...] = CORRUPTIONS, methods: tuple[str, ...] = tuple(ADAPTERS)
) -> list[dict[str, Any]]:
    """Ten clients with every method and collaboration; clients 0-4 and 5-9 are similar."""
    generator = np.random.default_rng(5)
    hardness = dict(zip(corruptions, generator.uniform(-0.15, 0.15, len(corruptions)), strict=True))
    a_corruption = rounds // len(corruptions)
    events = []
    for (method, base), (together, gain) in itertools.product(ADAPTERS.items(), COLLABORATIONS.items()):
        if method not in methods:
            continue
        label = {"method": method, "collaboration": together}
        for number in range(1, rounds + 1):
            position = (number - 1) // a_corruption
            part = (number - 1) % a_corruption
            for partition, mix in enumerate(MIX):
                labels = np.repeat(list(mix), list(mix.values()))
                size = len(labels) // a_corruption
                total = np.bincount(labels[part * size : (part + 1) * size], minlength=10)
                corruption = corruptions[(position + 7 * (partition >= 5)) % len(corruptions)]
                share = np.clip(base + gain + hardness[corruption] + 0.1 * generator.normal(size=10), 0.02, 0.98)
                right = generator.binomial(total, share).tolist()
                events.append(adapted(number, partition, right, total.tolist(), corruption=corruption, **label))
            events.append(adapt_round(number, mixing(together, number, generator), **label))
            if number == 1:
                events[-1]["bytes_down"] = 4_000_000
    return events


def mixing(together: str, number: int, generator: np.random.Generator) -> list[list[float]]:
    """W of a round: identity, uniform, or two groups whose members give each other more weight over the rounds."""
    if together == "none":
        return np.eye(10).tolist()
    if together == "fedavg":
        return np.full((10, 10), 0.1).tolist()
    group = np.arange(10) // 5
    distance = 0.02 * number * (group[:, None] != group) + 0.3 * generator.random((10, 10))
    close = np.exp(-distance * (1 - np.eye(10)) * 2)
    return (close / close.sum(axis=1, keepdims=True)).tolist()


def clients_event() -> dict[str, Any]:
    return {"event": "clients", "class_counts": None, "classes": list(CLASSES), "sizes": [[0, 0, 15000]] * 10,
            "roles": ["target"] * 10}  # fmt: skip


class Elements(HTMLParser):
    """Collect the ids, references, tags and text of a page; end tags must match."""

    VOID = frozenset(["meta", "br", "wbr", "path", "use", "image", "rect"])

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
