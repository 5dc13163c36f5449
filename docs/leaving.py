"""The table of everything that leaves a client, generated from the message classes."""

from __future__ import annotations

import dataclasses

from fedtta.messages.replies import (
    Adapted,
    Evaluated,
    Identity,
    RefinedRates,
    Reply,
    SharedKeys,
    Summarized,
    Telemetry,
    Trained,
    Unmasked,
)
from fedtta.privacy.sums import AGGREGATED

_COUNTS = "a count over the validation split: exact, so several models together give single predictions"
#: What the server, or one who reads what it stores, can learn from a field.
TELLS: dict[type[Reply], dict[str, str]] = {
    Identity: {
        "num_examples": "nothing: 1",
        "name": "who it is",
        "classes": "the class names of its data; those of the run in a divided data set",
        "channels": "grey or colour",
        "mean": "how its images are normalized: of the run, or of its pretrained weights",
        "std": "as mean",
        "sizes": "how many samples it has",
        "shifts": "whether it has labels",
        "note": "which domains or streams are not at hand",
        "role": "whether it has labels to train on",
        "corruptions": "nothing: names of the run's streams",
        "stream_rounds": "the length of its stream",
        "saved": "in which rounds of this run it took part",
        "own_data": "whether it brings data of its own",
        "images": "which data set the run divides",
        "pixel_mean": "as images",
        "labelled": "whether it has labels",
        "samples": "how many files it has",
        "skipped": "how many of them cannot be used",
        "classes_present": "how many classes it has",
        "notes": "which classes it lacks, why files were skipped",
        "mask_key": "nothing: a public key",
    },
    Trained: {
        "num_examples": "how many samples it trains on",
        "arrays": "its class mix, from the head's bias (measured above); with a model of the server's choice and few "
        "samples single images: the device's policy sets the least number",
        "train_loss": "how well the model fits its data",
        "global_loss": "the same, of the received model; for q-FFL only",
        "validation_total": "how many samples it validates on",
        "validation_correct": _COUNTS,
        "personal_validation_correct": _COUNTS,
        "seconds": "its speed, and so its number of samples",
        "masked": "nothing by itself; the sum over the clients with it",
        "scales": "as arrays: the largest change of each, with `update-format = int8`",
        "trained_correct": f"{_COUNTS}; with `update-format = float16` or `int8`",
        "decoded_correct": "as trained-correct",
    },
    Summarized: {
        "num_examples": "how many samples it trains on",
        "statistics": "its class mix: descriptor and DLE are mixtures of the classes' means (measured above); "
        "statistics on request (label prior, confusion, block scores) say it directly",
        "validation_total": "how many samples it validates on",
        "validation_correct": _COUNTS,
        "personal_validation_correct": _COUNTS,
        "seconds": "its speed",
        "masked": "nothing by itself; the sum over the clients with it",
    },
    RefinedRates: {
        "num_examples": "how many samples it validates on",
        "rates": "D numbers: which modules its kind of images moves; little of single samples",
        "loss": "how well the adapted network fits its data",
        "correct": _COUNTS,
        "seconds": "its speed",
        "context_bytes": "nothing: bytes of Flower's context",
        "masked": "nothing by itself; the sum over the clients with it",
    },
    Adapted: {
        "num_examples": "the size of its batch",
        "shared": "the domain of its stream, and with class statistics which classes it has seen (`share = affine` "
        "tells least)",
        "normalization": "mean and variance of its batch in each layer: its domain",
        "start": "nothing of the stream: the state before it",
        "corruption": "the corruption of its stream; in benchmarks only",
        "correct": "right predictions a class; in benchmarks only, 0 without labels",
        "total": "the class counts of its batch; in benchmarks only, 0 without labels",
        "seconds": "its speed",
        "context_bytes": "nothing: bytes of Flower's context",
    },
    Evaluated: {
        "num_examples": "how many samples it tests on",
        "checked": "how many samples it tests on",
        "leaked": "whether its splits overlap",
        "results": "right predictions of each row on each test distribution: exact, so ten constant models would give "
        "its test counts; means and a histogram of e; with `estimate-accuracy`, estimates without labels, which an "
        "agent leaves out if `count-step` is above 1",
        "served": "which model its agent serves, or why not",
    },
    SharedKeys: {
        "num_examples": "nothing: 1",
        "key": "nothing: a public key",
        "shares": "nothing without the keys of more than half of the members",
        "key_digests": "nothing: digests of random numbers",
        "seed_digests": "nothing: digests of random numbers",
        "seed_digest": "nothing: a digest of a random number",
    },
    Telemetry: {
        "num_examples": "nothing: 1",
        "name": "who it is",
        "software": "versions of Python, PyTorch, Flower and FedTTA",
        "uptime": "when its process began",
        "model": "which model it serves",
        "candidate": "which model it tries or has not approved",
        "refused": "which model it refused, and why, without figures if `count-step` is above 1",
        "adapter": "its test-time adaptation",
        "choice": "which adapter `auto` takes for the best there: whether its images are like its training data",
        "phase": "whether it works for a federation",
        "predictions": "how much it is used, and when",
        "refusals": "how many prediction requests were refused",
        "samples": "how much it is used",
        "unsaved_samples": "nothing more",
        "latency": "its speed, and how many requests it gets",
        "latency_sum": "its speed",
        "weight": "how far its images differ from its training data, as a mean over 100 images",
        "weights": "the same over time",
        "estimated_accuracy": "the same, and how accurate its model was on its own samples, from a rounded count",
        "drift": "how far its class mix has moved, not to which classes; of a model that predicts one class only, how "
        "usual that is",
        "holding": "whether its inputs are degenerate, or its adapter has collapsed",
        "guard_events": "how often they were",
        "saving_fails": "whether its disk fails",
        "disk_used": "nothing more",
        "disk_free": "the size of its disk",
        "memory": "nothing more",
        "data_samples": "how many files it has",
        "data_skipped": "how many of them cannot be used",
    },
    Unmasked: {"num_examples": "nothing: 1", "shares": "the masks of the sum, of each member of one kind"},
}


def rows(reply: type[Reply]) -> list[list[str]]:
    """Return field, what it tells, and what protects it, for every field; KeyError for one without a line."""
    return [
        [f"`{one.name.replace('_', '-')}`", TELLS[reply][one.name], protection(reply, one.name)]
        for one in dataclasses.fields(reply)
    ]


def protection(reply: type[Reply], field: str) -> str:
    """Return what hides a field when a setting is on; empty: nothing does, or it tells nothing."""
    if reply is Identity and field in ("classes_present", "notes"):
        return "left out under both settings"
    how = AGGREGATED.get(reply)
    if how is None:
        return ""
    if field == how.arrays:
        return (
            f"secure aggregation: in the sum only; differential privacy: clipped, with noise (`{how.releases}=z/clip`)"
        )
    if reply is Trained and field in ("scales", "trained_correct", "decoded_correct"):
        noise = "of noisy arrays" if field == "scales" else "left out"
        return f"secure aggregation: refused with it; differential privacy: {noise}"
    if field in (how.loss, "global_loss", *how.counts):
        return "secure aggregation: in the sum only; differential privacy: left out"
    return "secure aggregation: in the sum only" if field == "num_examples" else ""
