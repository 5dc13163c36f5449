"""When the guard lets an adapter go on, holds it and rolls it back."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedtta.client.agent.guard import COLLAPSES, KINDS, Guard, LastGood, Verdict, flat_images
from fedtta.client.agent.live import Live, as_floats, checked
from fedtta.client.config import Limits
from fedtta.client.served import Baseline, entropy
from tests.client.agent.world import served, unseen

K = 4
LIMITS = Limits(window=16, margin=0.25, retry=20, least_batch=2)  # at most 4 of 16 answers differ


def guard(limits: Limits = LIMITS, shares: list[float] | None = None, per_batch: bool = False) -> Guard:
    baseline = Baseline.unknown(K) if shares is None else Baseline(np.array(shares))
    return Guard(limits, baseline, per_batch)


def rows(classes: list[int], sure: float = 0.9) -> NDArray[np.float64]:
    """Probabilities [B, K] whose largest is `sure`, at the given classes."""
    p = np.full((len(classes), K), (1 - sure) / (K - 1))
    p[np.arange(len(classes)), classes] = sure
    return p


MIXED = [0, 1, 2, 3] * 4


def test_an_ordinary_batch_goes_and_is_worth_keeping() -> None:
    watch = guard()
    verdict = watch.judge(rows(MIXED), rows([*MIXED[1:], 0]))  # all differ
    assert (verdict.action, verdict.healthy, sum(watch.events.values())) == ("go", True, 0)


def test_one_class_beyond_what_the_unadapted_model_says_is_a_collapse() -> None:
    watch = guard()
    verdict = watch.judge(rows(MIXED), rows([2] * 16))
    assert (verdict.action, verdict.kind, watch.events["collapse"]) == ("roll back", "collapse", 1)
    assert watch.runs_adapter  # it goes on
    # at the edge: 14 of 16 are 0.875, below 0.9
    assert guard().judge(rows(MIXED), rows([2] * 14 + [0, 1])).action == "go"


def test_few_samples_are_no_collapse() -> None:
    watch = guard()
    assert [watch.judge(rows([k]), rows([2])).action for k in (0, 1, 3)] == ["go"] * 3
    assert watch.judge(rows([0]), rows([2])).kind == "collapse"  # a quarter of the window


def test_what_the_client_has_most_of_is_no_collapse() -> None:
    assert guard(shares=[0.1, 0.1, 0.8, 0.1]).judge(rows(MIXED), rows([2] * 16)).action == "go"


def test_next_to_no_entropy_and_half_of_it_elsewhere_is_a_collapse() -> None:
    shares = [0.45, 0.45, 0.05, 0.05]
    unadapted, adapted = rows([0, 1] * 8), rows([2, 3] * 8, sure=1.0)
    assert guard(shares=shares).judge(unadapted, adapted).kind == "disagreement"
    assert guard(shares=shares).judge(unadapted, rows([2, 3] * 8)).action == "go"  # not sure
    usual = guard(shares=[0.45] * 4)  # and these classes are usual
    assert usual.judge(unadapted, adapted).action == "go"


def test_a_probability_that_is_no_number_rolls_back() -> None:
    watch, adapted = guard(), rows(MIXED)
    adapted[3, 1] = np.nan
    assert watch.judge(rows(MIXED), adapted).kind == "non-finite"
    # once more soon after: the adapter is left alone for a while
    assert watch.judge(rows(MIXED), adapted).action == "roll back"
    assert not watch.runs_adapter
    assert watch.events["non-finite"] == 2


@pytest.mark.parametrize(
    ("kind", "unadapted", "flat"),
    [
        ("one-class", rows([1] * 16), None),
        ("noise", rows(MIXED, sure=0.3), None),
        ("constant", rows(MIXED), np.ones(16, bool)),
    ],
)
def test_on_degenerate_input_only_so_many_answers_differ(kind: str, unadapted: NDArray, flat: NDArray | None) -> None:
    plain = unadapted.argmax(1)
    for differing, action in ((4, "go"), (5, "hold")):
        watch = guard()
        adapted = rows([(k + 1) % K if i < differing else k for i, k in enumerate(plain)])
        verdict = watch.judge(unadapted, adapted, flat)
        assert (verdict.action, verdict.healthy) == (action, False)
        assert watch.events[kind] == (action == "hold")


def test_small_batches_count_for_methods_defined_per_batch_only() -> None:
    for per_batch, least in ((True, "hold"), (False, "go")):
        watch = guard(per_batch=per_batch)
        actions = [watch.judge(rows([k]), rows([(k + 1) % K])).action for k in MIXED[:6]]
        assert actions == ["go"] * 4 + [least] * 2
        assert watch.runs_adapter  # the next batch may be larger


def test_the_adapter_is_tried_again() -> None:
    watch = guard()
    assert watch.judge(rows([1] * 16), rows([2] * 16)).kind == "collapse"
    watch = guard()
    assert watch.judge(rows([1] * 16), rows([2, 3] * 8)).action == "hold"
    for _ in range(5):  # 20 samples
        assert not watch.runs_adapter
        assert watch.judge(rows([0, 1, 2, 3]), None).action == "hold"
    assert watch.runs_adapter
    assert watch.holding
    assert watch.judge(rows(MIXED), rows(MIXED)).action == "go"
    assert not watch.holding
    assert watch.events["one-class"] == 1


def test_a_guard_goes_on_from_its_state() -> None:
    one = guard()
    one.judge(rows([1] * 10), rows([1] * 6 + [2] * 4))
    two = guard()
    two.load(one.state())
    assert [g.judge(rows([1]), rows([3])).action for g in (one, two)] == ["hold", "hold"]
    assert two.runs_adapter == one.runs_adapter
    with pytest.raises(ValueError, match="does not fit"):
        two.load({"window": np.zeros((2, 3)), "numbers": np.zeros(3)})


@pytest.mark.parametrize(
    "state",
    [
        {"numbers": np.array([0, 0, len(KINDS)])},
        {"numbers": np.zeros(3)},
        {"window": np.full((1, 6), np.nan)},
        {"window": np.full((1, 6), 99.0)},
    ],
)
def test_a_state_out_of_range_changes_nothing(state: dict[str, NDArray]) -> None:
    one = guard()
    one.judge(rows([1] * 10), rows([1] * 6 + [2] * 4))
    before = one.state()
    with pytest.raises(ValueError, match="out of range"):
        one.load({**before, **state})
    np.testing.assert_equal(one.state(), before)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=30), st.integers(0, 2**32 - 1))
def test_no_window_of_a_degenerate_stream_has_more_differing_answers(sizes: list[int], seed: int) -> None:
    watch, draw, differs = guard(), np.random.default_rng(seed), []
    for size in sizes:
        unadapted = rows([1] * size)
        adapted = rows(draw.integers(K, size=size).tolist()) if watch.runs_adapter else None
        verdict = watch.judge(unadapted, adapted)
        wrong = [False] * size if adapted is None else (adapted.argmax(1) != 1).tolist()
        differs += wrong if verdict.action == "go" else [False] * size
    windows = [sum(differs[i : i + LIMITS.window]) for i in range(len(differs))]
    assert max(windows) <= LIMITS.margin * LIMITS.window


def test_answers_given_before_a_roll_back_count() -> None:
    watch = guard()
    assert [watch.judge(rows([1]), rows([2])).action for _ in range(4)] == ["go", "go", "go", "roll back"]
    assert watch.judge(rows([1]), rows([3])).action == "go"  # the fourth that differs
    assert watch.judge(rows([1]), rows([0])).kind == "one-class"


def test_the_last_good_state_has_a_whole_window_after_it() -> None:
    last = LastGood(0, 10)
    for state in range(1, 8):  # five samples each
        last.note(lambda: state, 5)  # noqa: B023 (called at once)
    assert last.state == 4  # 6 is the next, once ten samples have followed it
    last.spoil()
    last.note(lambda: 8, 10)
    assert last.state == 4


def test_entropy_by_hand() -> None:
    np.testing.assert_allclose(entropy(np.array([[1.0, 0.0], [0.5, 0.5]])), [0, np.log(2)])


def test_images_without_variance_and_repeated_ones() -> None:
    draw = np.random.default_rng(0)
    pixels = draw.random((4, 3, 5, 5))
    pixels[1] = np.array([0.1, 0.2, 0.3])[:, None, None]  # one value a channel
    pixels[3] = pixels[2]
    assert flat_images(pixels).tolist() == [False, True, False, True]
    assert flat_images(pixels, pixels[0]).tolist() == [True, True, False, True]
    assert flat_images(pixels, np.zeros((3, 2, 2))).tolist() == [False, True, False, True]


# --- with adapters, on a network trained on the digits ---

ADAPTERS = ("fedthe", "btfl", "tent", "bn_adapt", "eata", "t3a", "shot")
REAL = Limits(window=64, retry=64)  # margin 0.05: 3 of 64 answers


@lru_cache(maxsize=1)
def degenerate() -> list[tuple[str, NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64], int]]:
    """Name, images of whole windows, what the unadapted model says, labels (which that stands for where there are
    none) and batch size.
    """
    pixels, labels = unseen()
    draw = np.random.default_rng(0)
    streams: list[tuple[str, NDArray[np.uint8], NDArray[np.int64] | None, int]] = []
    for k in (0, 8):
        index = np.resize(np.flatnonzero(labels == k), 192)
        streams.append((f"class {k}", pixels[index], labels[index], 32))
        streams.append((f"class {k}, batches of one", pixels[index[:64]], labels[index[:64]], 1))
    streams += [
        ("grey", np.full((128, *pixels.shape[1:]), 128, np.uint8), None, 32),
        ("stuck camera", pixels[np.zeros(128, int)], labels[np.zeros(128, int)], 32),
        ("noise", draw.integers(0, 256, (192, *pixels.shape[1:])).astype(np.uint8), None, 32),
    ]
    found = []
    for name, images, known, size in streams:
        plain, _ = answers("none", images, 32, None)
        found.append((name, images, plain, plain if known is None else known, size))
    return found


def answers(name: str, pixels: NDArray[np.uint8], size: int, limits: Limits | None) -> tuple[NDArray[np.int64], Live]:
    live = Live(served(name), limits, lambda text: None)
    parts = [pixels[begin : begin + size] for begin in range(0, len(pixels), size)]
    return np.concatenate(
        [live.predict(as_floats(checked(part, live.served.shape)))[0].argmax(1) for part in parts]
    ), live


@pytest.mark.parametrize("name", ADAPTERS)
def test_never_worse_than_unadapted_by_more_than_the_margin(name: str) -> None:
    for stream, pixels, plain, truth, size in degenerate():
        guarded, _ = answers(name, pixels, size, REAL)
        differs = (guarded != plain).astype(int)
        allowed = REAL.margin * max(REAL.window, size)
        assert max(differs[i : i + REAL.window].sum() for i in range(len(differs))) <= allowed, stream
        assert (guarded == truth).mean() >= (plain == truth).mean() - REAL.margin, stream


def test_unguarded_the_same_streams_do_harm() -> None:
    worse = set()
    for stream, pixels, plain, truth, size in degenerate():
        free, _ = answers("tent", pixels, size, None)
        if (free == truth).mean() < (plain == truth).mean() - 0.1:
            worse.add(stream)
    # which of them also depends on the processor's arithmetic
    assert len(worse) >= 5, worse


@pytest.mark.parametrize("name", ADAPTERS)
def test_on_ordinary_streams_the_guard_stays_out_of_the_way(name: str) -> None:
    pixels, _ = unseen()
    draw = np.random.default_rng(1)
    index = draw.permutation(len(pixels))[:192]
    shifted = pixels[index] * 0.7 + 20 + draw.normal(0, 12, pixels[index].shape)
    for stream in (pixels[index], shifted.clip(0, 255).astype(np.uint8)):
        free, _ = answers(name, stream, 32, None)
        guarded, live = answers(name, stream, 32, REAL)
        assert (free == guarded).all()
        assert live.guard is not None
        assert not any(live.guard.events.values())
        assert set(COLLAPSES) < set(live.guard.events)


def test_what_is_undone_is_noted_when_it_happens_again_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    live = Live(served("tent"), REAL, notes.append)
    part = as_floats(checked(unseen()[0][:8], live.served.shape))

    def fails(x: Any) -> Any:
        return x.new_full((len(x), 10), float("nan"))

    def request() -> None:
        with live.undone_on_error():
            live.predict(part)
            raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(live.adapter, "_predict", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            request()
    acted = "guard: non-finite after 0 samples: roll back"
    assert notes == [acted]
    live.predict(part)
    assert notes == [acted]
    with monkeypatch.context() as patched:
        patched.setattr(live.adapter, "_predict", fails)
        live.predict(part)
    assert notes == [acted, "guard: non-finite after 8 samples: roll back"]


def test_small_batches_are_noted_once_and_other_events_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A note tells how many samples came before it."""
    pixels, _ = unseen()
    notes: list[str] = []
    live = Live(served("tent"), REAL, notes.append)
    assert live.guard is not None
    events, kinds = live.guard.events, iter(["small-batch", "small-batch", "noise", "noise"])

    def judge(*batch: object) -> Verdict:
        events[kind := next(kinds)] += 1
        return Verdict("hold", kind)

    monkeypatch.setattr(live.guard, "judge", judge)
    for part in np.split(pixels[:4], 4):
        live.predict(as_floats(checked(part, live.served.shape)))
    assert notes == [
        "guard: small-batch after 0 samples: hold",
        "guard: noise after 2 samples: hold",
        "guard: noise after 3 samples: hold",
    ]
