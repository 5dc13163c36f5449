"""A made-up run, as a server would write it, for the tests of the report; and that all of it is read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from server.report import (
    WEIGHT_BINS,
    Results,
    read_results,
    write_report,
)

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


def test_reads_every_event(tmp_path: Path) -> None:
    results = results_of(tmp_path, whole_run(clients=3, rounds=2))
    assert results.run is not None
    assert results.run.commit == "3f2c1ab"
    assert results.clients is not None
    assert len(results.clients.sizes) == 3
    assert len(results.rounds) == 4
    assert len(results.evaluations) == len(METHODS) * len(SHIFTS) * 3
    assert [entry.event for entry in results.incidents] == ["refused", "failed"]
    assert results.leak_checks[0].checked == 1234
    assert results.end is not None
    assert results.trainings() == ["cross_entropy", "balanced_softmax"]
