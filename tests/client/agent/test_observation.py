"""What a device measures of itself, against loops over single requests and images."""

from __future__ import annotations

import math
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtta.client.agent import observation
from fedtta.client.agent.guard import Guard
from fedtta.client.agent.observation import CONFIDENCE_WINDOW, Observation, Recent, folder_bytes, resident_bytes
from fedtta.client.agent.status import Status
from fedtta.client.config import Limits
from fedtta.client.policy import Policy
from fedtta.client.served import Baseline
from fedtta.messages.record import MOST
from fedtta.messages.replies import LATENCY_BOUNDS, WEIGHT_WINDOW, WEIGHTS_KEPT, Telemetry
from tests.client.agent.fake import config

HERE = Path(__file__).parent  # a folder of few files in place of a state directory


def in_batches(weights: np.ndarray, sizes: Sequence[int]) -> Recent:
    recent, begin = Recent(), 0
    for size in sizes:
        recent.note(np.full((size, 2), 0.5), weights[begin : begin + size], None)
        begin += size
    return recent


@pytest.mark.parametrize("images", [0, 99, 100, 101, 731, 100 * WEIGHTS_KEPT + 250])
def test_means_of_e_do_not_depend_on_batches(images: int) -> None:
    weights = np.random.default_rng(images).random(images).astype(np.float32)
    numbers = [float(one) for one in weights]
    blocks = [numbers[begin : begin + WEIGHT_WINDOW] for begin in range(0, images, WEIGHT_WINDOW)]
    expected = [math.fsum(block) / len(block) for block in blocks if len(block) == WEIGHT_WINDOW][-WEIGHTS_KEPT:]
    last = numbers[-WEIGHT_WINDOW:]
    found = [
        in_batches(weights, sizes)
        for sizes in ([1] * images, [7] * (images // 7) + [images % 7], [images])
        if images or sizes == [images]
    ]
    for recent in found:
        assert recent.weights == found[0].weights
        assert recent.weight == found[0].weight
        assert list(recent.weights) == pytest.approx(expected, abs=1e-12)
        assert recent.weight == (pytest.approx(math.fsum(last) / len(last)) if last else None)


def test_weights_of_adapters_that_leave_the_range_a_little_stay_in_it() -> None:
    recent = in_batches(np.full(WEIGHT_WINDOW, np.float32(1 + 1e-6)), [WEIGHT_WINDOW])
    assert (recent.weights, recent.weight) == ((1.0,), 1.0)


def test_confidence_is_that_of_a_full_window() -> None:
    rows = np.random.default_rng(1).dirichlet([0.5] * 5, CONFIDENCE_WINDOW + 40)
    recent = Recent()
    for begin in range(0, CONFIDENCE_WINDOW - 1, 9):
        assert recent.confidence is None
        recent.note(rows[begin : begin + 9], None, rows[begin : begin + 9])
    recent.note(rows[begin + 9 :], None, rows[begin + 9 :])
    assert recent.confidence == pytest.approx(sum(max(row) for row in rows[40:].tolist()) / CONFIDENCE_WINDOW)
    assert (recent.weight, recent.weights) == (None, ())


@given(st.lists(st.one_of(st.floats(0, 20), st.sampled_from(LATENCY_BOUNDS)), max_size=60), st.integers(0, 5))
def test_every_request_is_in_one_interval(seconds: list[float], refusals: int) -> None:
    seen = Observation(config(HERE))
    for one in seconds:
        seen.answered(one)
        seen.predicted(2)
    for _ in range(refusals):
        seen.refused()
    found = seen.telemetry(Status(), None, None, {}, False)
    assert (sum(found.latency), found.refusals, found.predictions) == (len(seconds), refusals, 2 * len(seconds))
    for index, bound in enumerate(LATENCY_BOUNDS):
        assert sum(found.latency[: index + 1]) == sum(one <= bound for one in seconds)
    assert found.latency_sum == pytest.approx(math.fsum(seconds))


@pytest.mark.parametrize("size", [1, 7, 40])
def test_drift_is_the_distance_of_the_predicted_classes(size: int) -> None:
    rng, classes, window = np.random.default_rng(size), 5, 64
    usual = np.array([0.5, 0.3, 0.2, 0.2, 0.1])  # of each class the larger of two shares: more than 1 in all
    guard = Guard(Limits(window=window, high_entropy=2.0), Baseline(usual, 0.4), per_batch=False)
    predicted: list[int] = []
    while len(predicted) < 3 * window:
        rows = rng.dirichlet([0.2, 0.2, 3.0, 0.2, 0.2], size)
        guard.judge(rows, rows)
        predicted += [max(range(classes), key=row.__getitem__) for row in rows.tolist()]
        if len(predicted) < window:
            assert guard.drift is None
            continue
        counts = Counter(predicted[-window:])
        expected = sum(abs(counts[k] / window - share / 1.3) for k, share in enumerate(usual.tolist())) / 2
        assert guard.drift == pytest.approx(expected)
    assert guard.drift > 0.3
    guard.restart()
    assert guard.drift is None


def test_drift_needs_a_baseline() -> None:
    guard = Guard(Limits(window=8, high_entropy=2.0), Baseline.unknown(3), per_batch=False)
    rows = np.random.default_rng(1).dirichlet([1.0] * 3, 8)
    guard.judge(rows, rows)
    assert guard.drift is None
    assert Baseline(np.full(3, 1 / 3), 0.2).known


CHECK = {"samples": 61.0, "accuracy": 58 / 61, "confidence": 0.8}


def estimated(check: dict[str, float], confidence: float, images: int = CONFIDENCE_WINDOW, **policy: int) -> object:
    recent = Recent()
    rows = np.tile([confidence, 1 - confidence], (images, 1))
    recent.note(rows, None, rows)
    seen = Observation(config(HERE, policy=policy))
    return seen.telemetry(Status(), recent, None, check, False).estimated_accuracy


def test_the_estimate_needs_labels_and_a_full_window() -> None:
    assert estimated(CHECK, 0.7, **{"count-step": 1}) == pytest.approx(58 / 61 - 0.1)
    assert estimated({"samples": 61.0, "confidence": 0.8}, 0.7) is None
    assert estimated({}, 0.7) is None
    assert estimated(CHECK, 0.7, CONFIDENCE_WINDOW - 1) is None


def test_the_estimate_tells_no_more_of_the_labels_than_a_rounded_count() -> None:
    """A network that is equally sure of everything has the same confidence always."""
    for correct in range(3, 62):
        check = {"samples": 61.0, "accuracy": correct / 61, "confidence": 0.7}
        told = estimated(check, 0.7) * 61  # type: ignore[operator]
        assert told == pytest.approx(min(61, 5 * math.floor(correct / 5 + 0.5)))


def test_the_accuracy_of_predictions_is_what_the_unadapted_network_thinks_of_them() -> None:
    """Of the last images: two classes equally often, so that new shares change nothing; one in four is not its own."""
    check = {"adapted_samples": 40.0, "adapted_offset": 0.05, "adapted_variance": 0.004}
    plain = np.tile([[0.9, 0.1], [0.1, 0.9]], (CONFIDENCE_WINDOW // 2, 1))
    predicted, recent = plain.copy(), Recent()
    predicted[::4] = predicted[::4, ::-1]
    recent.note(plain[:50], None, plain[:50])
    assert recent.accuracy(check, lambda count, total: count) == ()
    recent.note(predicted, None, plain)
    accuracy, low, high = recent.accuracy(check, lambda count, total: count)
    assert accuracy == 0.75  # 0.05 + (3 · 0.9 + 0.1) / 4
    seen = [*[0.9] * 75, *[0.1] * 25, 0, 1]
    error = math.sqrt(0.004 + np.var(seen) / 102)
    assert (low, high) == (round(40 * (0.75 - 1.96 * error)) / 40, round(40 * (0.75 + 1.96 * error)) / 40)
    assert recent.accuracy(check, Policy(count_step=5).rounded) == (0.75, 0.625, 0.875)
    assert recent.accuracy({"accuracy": 0.5}, lambda count, total: count) == ()
    recent.note(predicted, None, None)  # without the unadapted network nothing is known of these
    assert recent.accuracy(check, lambda count, total: count) == (accuracy, low, high)


def test_the_disk_is_looked_at_now_and_then(tmp_path: Path) -> None:
    (tmp_path / "state" / "a").mkdir(parents=True)
    (tmp_path / "state" / "a" / "x").write_bytes(bytes(1000))
    (tmp_path / "state" / "link").symlink_to("/dev/full")
    now = [0.0]
    seen = Observation(config(tmp_path / "state"), lambda: now[0])

    def used() -> int:
        return seen.telemetry(Status(), None, None, {}, False).disk_used

    link = len("/dev/full")
    assert used() == folder_bytes(tmp_path / "state") == 1000 + link
    (tmp_path / "state" / "y").write_bytes(bytes(24))
    assert used() == 1000 + link
    now[0] = observation.DISK_SECONDS
    assert used() == 1024 + link


def test_a_disk_without_bounds_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems say that they have 2^63 bytes free: no reason to refuse a device's telemetry."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**63))
    told = Observation(config(HERE)).telemetry(Status(), None, None, {}, False)
    assert Telemetry.from_record(told.to_record()).disk_free == MOST


def test_memory_is_that_of_this_process() -> None:
    """The system may take pages back in between: two readings of one moment, by two of its files."""
    told = resident_bytes()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (other,) = re.findall(r"VmRSS:\s+(\d+) kB", status)
    assert told == pytest.approx(1024 * int(other), rel=0.1)
    assert told > 16 << 20  # no process with numpy has less


def test_what_is_told_fits_the_message() -> None:
    """Names are cut and cleaned where a run or an owner chose long ones."""
    status = Status(
        version="r" * 128 + "/" + "t" * 128 + "/1/abcdabcd", adapter="memo[\x1b]", candidate="c" * 5000, samples=3
    )
    told = Observation(config(HERE)).telemetry(status, Recent(), None, {}, True)
    read = Telemetry.from_record(told.to_record())
    assert read.model == "r" * 128 + "/" + "t" * 68 + "..."
    assert (read.adapter, len(read.candidate)) == ("memo[\ufffd]", 4000)
    assert (read.weight, read.drift, read.estimated_accuracy, read.saving_fails) == (None, None, None, True)
    assert {"python", "torch"} <= set(read.software)
