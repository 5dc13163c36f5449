"""auto: choose among adapters without labels, by what each is estimated to gain over not adapting.

There is no paper. The estimate is `label_shift` (`fedtta.tta.estimates`) with one difference: v_a is the probability
that the unadapted network gives to the class which candidate a predicts, given the class shares of the last W samples;
c_a is whether a is right. Calibrated on the client's validation split,

    gain(a) = mean of (v_a - v_none) over the last W samples + mean of ((c_a - v_a) - (c_none - v_none)) over validation

Both are means of differences on the same samples: what the estimate gets wrong about both alike cancels.

The class shares are those of the validation split, with half a sample more of each class, unless a likelihood-ratio
test of the W samples rejects them at level `LEVEL`; then they are estimated from the W samples. So a device that sees
its own classes soon knows which candidate is best there, however blurred its images are, and one that sees others'
classes finds out. A network from clients of few classes each may favour some of them. Where the test rejects the
shares of the validation split on that split itself, the network's probabilities are weighted by class such that it
would not (`class_weights`), there and in the stream.

The choice is the candidate with the largest

    gain(a) - caution · its standard error,

and "none" where that is not above `margin` for any: it takes evidence to leave "none". The unadapted network is the
judge: where it is hardly better than chance, so is the choice, and nothing here finds that out.

A candidate's means are over those of the W samples that it has predicted. It is chosen again whenever a twentieth of
them is new, after each sample at first; the prediction of that sample is already the new choice's, and no later sample
is looked at. With a candidate whose results depend on batches, all of this goes by batches; without one, results do not
depend on how the stream is cut.

1. "none", the choice, and all candidates that need no more of the network than its outputs always predict.
2. The others do in probes of W samples, which begin with the stream and every `every` samples. They are reset then,
   but for the choice, as they were for their calibration.
3. After a sample at which the drift test (`fedtta.tta.drift`) finds a change of the unadapted network's outputs, what
   was before counts no more: a probe begins, and all candidates but the choice are reset.

Cost: one forward pass a sample serves "none", the heads, FedTHE, BTFL, T3A, EM, BBSE and kNN-Per together; with these
alone there is no other. With the others' passes f_a a sample it is 1 + Σ f_a in a probe and 1 + f_choice outside: at
most 1 + max f_a + (W / every) Σ f_a over a long stream without drift.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from fedtta.tta.arrays import namespace, to_host
from fedtta.tta.base import Adapter, prefixed
from fedtta.tta.checks import check_finite, check_least, check_number, class_count
from fedtta.tta.drift import DriftTest, outputs
from fedtta.tta.estimates import Calibration, Signals, calibrated, class_shares, judged, slid, with_shares
from fedtta.tta.registry import LIGHT

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

NONE = "none"
PLAIN = "unadapted"  # the window of the unadapted probabilities; the others hold predicted classes
#: Adapters that need no more of a network than its outputs.
OF_OUTPUTS = (*LIGHT, "knn_per")
#: Candidates by default: those whose statistics do not tell a client's class counts.
USUAL = (NONE, "personal", "fixed_mix", "fedthe", "btfl", "t3a", "bn_adapt")
#: Those of them that an agent chooses from by default: one pass serves all, and requests may be of any size.
SERVED = tuple(name for name in USUAL if name in OF_OUTPUTS)
#: Why the choice is what it is.
CAUSES = ("the first samples", "a probe in its turn", "the samples after drift", "later samples")
FIRST, IN_TURN, DRIFT, LATER = range(len(CAUSES))
PARTS = 20  # of the window; when one of them is new, the choice is made again
LEVEL = 0.01  # of the test whether samples have the class shares of the validation split
STEPS, CHANGE, LEAST = 200, 1e-4, 1e-6  # of `class_weights`: at most, the change that ends them, a probability


@dataclass(frozen=True)
class Gains:
    """What a client's labelled samples say about candidates.

    Parameters
    ----------
    of : mapping
        Name → the calibration of v_a - v_none and c_a - c_none; "none" is among them.
    shares, weights : tuple of float
        Class shares of the samples, and weights of the network's probabilities, [K]. Both empty, as in models of former
        versions: the class shares of a stream are always estimated from it.
    """

    of: Mapping[str, Calibration]
    shares: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class Candidates:
    """The adapters that may be chosen.

    Parameters
    ----------
    make : mapping
        Name → what makes a new one for a network.
    gains : Gains
        Of all of them.
    """

    make: Mapping[str, Callable[[nn.Module], Adapter]]
    gains: Gains


def calibrate_gains(predicted: Mapping[str, NDArray[Any]], labels: NDArray[Any]) -> Gains:
    """Return the calibrated gain of each candidate, given what new ones predict for the same labelled samples.

    Parameters
    ----------
    predicted : mapping
        Name → probabilities [n, K], n at least 1; "none" is among them.
    labels : int [n]
    """
    plain = predicted[NONE]
    counts = np.bincount(labels, minlength=plain.shape[1])
    shares = (counts + 0.5) / (counts + 0.5).sum()
    favours = likely_shares(plain, shares) is not shares
    weights = class_weights(plain, shares, counts) if favours else np.ones(len(counts))
    posterior = with_shares(plain, weights * shares)
    best = {name: rows.argmax(1) for name, rows in predicted.items()}
    missed = {name: (classes == labels) - judged(posterior, classes) for name, classes in best.items()}
    of = {name: calibrated(values - missed[NONE], least=-2) for name, values in missed.items()}
    return Gains(of, tuple(shares.tolist()), tuple(weights.tolist()))


def class_weights(
    probabilities: NDArray[Any], shares: NDArray[np.float64], counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return weights w [K] of a network's probabilities under which class shares q are the most likely ones of samples.

    The derivative of the log-likelihood by q_k, divided by n, is the mean of w_k p_ik / Σ_j q_j w_j p_ij. With these
    weights it is 1 for each class that occurs. A class that does not keeps the weight 1, or has one so much lower that
    it is at most 1 there, too: a network that sees it in samples without it tells nothing by that.

    Parameters
    ----------
    probabilities : [n, K]
    shares : [K]
        q, positive.
    counts : [K]
        Samples of each class; w is scaled such that the geometric mean over samples of their class's is 1.
    """
    p = np.maximum(np.asarray(probabilities, np.float64), LEAST)
    occurs, w = counts > 0, np.ones(len(counts))
    for _ in range(STEPS):
        before, slope = w, (w * p / (p @ (w * shares))[:, None]).mean(0)
        w = w / slope
        w = w / np.exp(np.log(w[occurs]) @ counts[occurs] / counts.sum())
        w = np.where(occurs, w, np.minimum(1, before / slope))
        if np.abs(np.log(w / before)).max() < CHANGE:
            break
    return w


def likely_shares(probabilities: NDArray[Any], own: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the class shares [K] of samples: a client's own unless these are unlikely, else those estimated from them.

    Twice the logarithm of the likelihood ratio of both is χ² with K - 1 degrees of freedom where the own shares hold
    (Wilks 1938).

    Parameters
    ----------
    probabilities : [n, K]
        Of the unadapted network.
    own : [K]
        Positive; or empty.
    """
    p = np.asarray(probabilities, np.float64)
    found = class_shares(p)
    if not len(own):
        return found
    ratio = 2 * float(np.log((p @ found) / (p @ own)).sum())
    return found if ratio > chi_square_quantile(1 - LEVEL, p.shape[1] - 1) else own


def chi_square_quantile(share: float, degrees: int) -> float:
    """Return the quantile of the χ² distribution, to 1 % at 9 degrees of freedom, 5 % at 1 (Wilson, Hilferty 1931)."""
    if degrees == 0:
        return 0.0
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + NormalDist().inv_cdf(share) * math.sqrt(spread)) ** 3)


class _Once:
    """A network whose features of a batch are computed once, however many adapters ask for them."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self.forget()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def eval(self) -> _Once:
        """Return this network, which is in evaluation mode."""
        return self

    def hold(self, x: Any, z: Any) -> None:
        """Remember the features z [B, d] of a batch."""
        self._x, self._z = x, z

    def forget(self) -> None:
        """Forget the features: a batch may be another one at the same place in memory."""
        self.hold(None, None)

    def features(self, x: Any) -> Any:
        """Return z [B, d]."""
        if self._x is not x or self._z is None:
            self.hold(x, self.network.features(x))
        return self._z

    def __call__(self, x: Any) -> Any:
        """Return the global head's logits [B, K]."""
        return self.network.head(self.features(x))


@dataclass
class _Counters:
    """What a state has beside windows, drift test and candidates.

    Parameters
    ----------
    choice, since, cause : int
        Position of the choice among the names, samples before it became that, and its cause.
    position : int
        Samples since the reset.
    began, seen, drifted : int
        Cause of the last probe, samples since it began, and whether a next one is due because of drift.
    """

    choice: int = 0
    since: int = 0
    cause: int = FIRST
    position: int = 0
    began: int = FIRST
    seen: int = 0
    drifted: int = 0

    def check(self, names: int) -> None:
        """Raise ValueError for a value that no state of ours has."""
        most = {"choice": names - 1, "since": self.position, "cause": LATER, "began": DRIFT, "seen": self.position}
        for name, high in (most | {"drifted": 1}).items():
            if not 0 <= (value := getattr(self, name)) <= high:
                raise ValueError(f"state {name!r} of Auto is {value}: allowed is 0 to {high}")


class Auto(Adapter):
    """Predict with the adapter that is estimated to gain most over not adapting (see the module).

    Parameters
    ----------
    model : nn.Module
        A network with `features` and `head` (`fedtta.models.TwoHead`), or one that gives numpy arrays.
    candidates : Candidates
        "none" is among them.
    among : str
        Names of the candidates, as "none+fedthe+tent"; all of them must be in `candidates`. Empty: those of `USUAL`
        that fit the network.
    probe : int
        W, samples.
    every : int
        Samples from the begin of a probe to that of the next, at least W; 0: no further one without drift. Without
        effect where all candidates always predict.
    false_alarms : float
        In [0, 0.5]: without a change, the drift test finds one in t samples with at most t times this probability; 0:
        no drift test.
    caution : float
        Standard errors by which a gain must exceed `margin`, at least 0.
    margin : float
        Least gain, in [0, 1].
    record : bool
        Keep the report: `choice` [n], the position of the choice among the candidates' names (`names`).

    Attributes
    ----------
    names : tuple of str
        The candidates, "none" first.
    drift : DriftTest or None
        Its reference is the begin of the stream.

    Raises
    ------
    ValueError
        An option is out of range, or "none" or a candidate of `among` is missing.
    """

    name = "auto"
    adapts = "what the adapter does that it chooses"
    per: Literal["sample", "batch"] = "batch"
    needs = frozenset({"candidates", "personal_head", "descriptor", "dle", "entropy"})
    _non_negative = re.compile(r"(memory\.drift\.)?position|seen")  # of the candidates' state each checks its own

    def __init__(
        self,
        model: nn.Module,
        candidates: Candidates,
        *,
        among: str = "",
        probe: int = 200,
        every: int = 1000,
        false_alarms: float = 0.001,
        caution: float = 0.5,
        margin: float = 0.0,
        record: bool = True,
    ) -> None:
        check_least(1, probe=probe)
        check_least(0, every=every)
        check_number("caution", caution, 0, math.inf)
        check_number("margin", margin, 0, 1)
        if 0 < every < probe:
            raise ValueError(f"every={every}: allowed is 0, or at least probe={probe}")
        calibrated = candidates.gains.of
        wanted = [name for name in among.split("+") if name] or list(calibrated)
        if missing := sorted({NONE, *wanted} - set(calibrated)):
            raise ValueError(f"auto: {', '.join(missing)} not calibrated; there are: {', '.join(calibrated)}")
        super().__init__(model, record=record)
        self.names = (NONE, *(name for name in dict.fromkeys(wanted) if name != NONE))
        self.probe, self.every, self.caution, self.margin = probe, every, caution, margin
        self.drift = DriftTest(false_alarms=false_alarms) if false_alarms else None
        self._once = _Once(model)
        self._windows: Signals = {}
        self._classes = class_count(model, None)
        self._own = np.array(candidates.gains.shares)
        self._weights = np.array(candidates.gains.weights or (1.0,) * self._classes)
        if len(self._own) not in (0, self._classes) or len(self._weights) != self._classes:
            raise ValueError(
                f"auto: class shares of {len(self._own)} classes and {len(self._weights)} weights; "
                f"the network has {self._classes} classes"
            )
        self._gains = {name: calibrated[name] for name in self.names}
        self.candidates = {
            name: candidates.make[name](cast("nn.Module", self._once) if name in OF_OUTPUTS else model)
            for name in self.names
        }
        self._pausing = tuple(name for name in self.names if name not in OF_OUTPUTS)
        self.per = "sample" if all(one.per == "sample" for one in self.candidates.values()) else "batch"
        self.reset()

    @property
    def choice(self) -> str:
        """Return the name of the present choice."""
        return self.names[self._at.choice]

    @property
    def reason(self) -> str:
        """Return since which sample the present choice has been that, and why, in words."""
        return f"since sample {self._at.since} ({CAUSES[self._at.cause]})"

    def unadapted(self, x: Tensor) -> Tensor:
        """Return the global head's logits [B, K]; if `x` is predicted next, that needs no other pass of the network."""
        self._once.forget()
        logits: Tensor = self._once(x)
        return logits

    def _predict(self, x: Tensor) -> Tensor:
        try:
            z, logits = self._once.features(x), self._once(x)
            check_finite("the network's output", namespace(z).concat((z, logits), axis=1))
            if len(x) == 0:
                return self.candidates[NONE].predict(x)
            return self._predict_all(x, z)
        finally:
            self._once.forget()

    def _predict_all(self, x: Tensor, z: Tensor) -> Tensor:
        """Predict a batch part by part, or leave everything as it was."""
        before = self.state_dict() if self._pausing else {}  # a candidate that trains may fail when others have moved
        parts, choices = [], list[int]()
        try:
            while len(choices) < len(x):
                rows, chosen = self._predict_some(x[len(choices) :], z[len(choices) :])
                parts.append(rows)
                choices += chosen
        except Exception:
            if before:
                self._load(before)
            raise
        self._note(choice=np.array(choices, np.int64))
        return namespace(parts[0]).concat(parts, axis=0)

    def _predict_some(self, x: Tensor, z: Tensor) -> tuple[Tensor, list[int]]:
        """Predict the first samples of a batch, up to one after which other candidates run; all if they go by batches.

        The choices are positions among the names, one a sample.

        They run on ahead of the choice: where that changes who runs before the last of these samples, they go back.
        """
        self._begin_probe()
        running, step = self._running, 1 if self.per == "sample" else len(x)
        ends = [end - self._at.seen for end in (self.probe, self.every) if end > self._at.seen and self._pausing]
        most = max(step, min([len(x), *ends]))
        x, z, choices = x[:most], z[:most], list[int]()
        before = {name: self.candidates[name].state_dict() for name in running if most > step}
        rows = self._rows(running, x, z)  # [candidates, B, K]
        known = to_host(rows).astype(np.float64)
        while len(choices) < most and not self._at.drifted and self._running == running:
            self._observe(running, known[:, len(choices) : len(choices) + step])
            choices += [self._at.choice] * step
        if (taken := len(choices)) < most:
            for name in running:
                self.candidates[name].load_state_dict(before[name])
            self._rows(running, x[:taken], z[:taken])
        return rows[[running.index(self.names[one]) for one in choices], list(range(taken))], choices

    @property
    def _running(self) -> tuple[str, ...]:
        """Return the candidates that predict the next sample, "none" first."""
        if self._at.seen < self.probe:
            return self.names
        return tuple(name for name in self.names if name not in self._pausing or name == self.choice)

    def _rows(self, running: tuple[str, ...], x: Tensor, z: Tensor) -> Tensor:
        """Return what candidates predict for a batch with features z, [candidates, B, K]."""
        self._once.hold(x, z)
        rows = [self.candidates[name].predict(x) for name in running]
        return namespace(rows[0]).stack(rows, axis=0)

    def _observe(self, running: tuple[str, ...], known: NDArray[np.float64]) -> None:
        """Look for drift in what the running candidates predict, [candidates, n, K], and choose again if it is time."""
        batch = dict(zip(running, known.argmax(2).astype(np.float64), strict=True)) | {PLAIN: known[0]}
        # a candidate that pauses loses its window: what it missed would be another stream's
        self._windows = {**self._no_windows(), **slid(self._windows, batch, self.probe)}
        at, probing = self._at, self._at.seen < self.probe
        before, at.seen, at.position = at.position, at.seen + known.shape[1], at.position + known.shape[1]
        due = self.per == "batch" or at.seen % max(1, min(at.seen, self.probe) // PARTS) == 0
        if due and (choice := self.names.index(self._best(running))) != at.choice:
            at.choice, at.since, at.cause = choice, before, at.began if probing else LATER
        at.drifted = int(self.drift is not None and bool(self.drift.update(outputs(known[0]))))

    def _begin_probe(self) -> None:
        """Begin a probe if there was drift or it is time."""
        at = self._at
        if not at.drifted and not (self._pausing and 0 < self.every <= at.seen):
            return
        for name in self.names if at.drifted else self._pausing:
            if name not in (NONE, self.choice):
                self.candidates[name].reset()
        if at.drifted:
            self._windows = self._no_windows()
        at.began, at.seen, at.drifted = DRIFT if at.drifted else IN_TURN, 0, 0

    def _no_windows(self) -> Signals:
        return {name: np.empty(0) for name in self.names} | {PLAIN: np.empty((0, self._classes))}

    def _best(self, running: tuple[str, ...]) -> str:
        """Return the running candidate with the largest cautious gain over "none", or "none"."""
        best, most = NONE, self.margin
        if running == (NONE,):
            return best
        plain = with_shares(self._windows[PLAIN], self._weights)
        posterior = with_shares(plain, likely_shares(plain, self._own))
        none = judged(posterior, self._windows[NONE])
        for name in running[1:]:
            n = len(self._windows[name])
            more = judged(posterior[-n:], self._windows[name]) - none[-n:]
            gain, error = self._gains[name].corrected(more, least=-1)
            if gain - self.caution * error > most:
                best, most = name, gain - self.caution * error
        return best

    def _reset(self) -> None:
        for one in self.candidates.values():
            one.reset()
        if self.drift is not None:
            self.drift.reset()
        self._at, self._windows = _Counters(), self._no_windows()

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {name: np.array(value) for name, value in vars(self._at).items()}
        state |= {f"memory.{name}": values for name, values in self._windows.items()}
        if self.drift is not None:
            state |= {f"memory.drift.{name}": value for name, value in self.drift.state_dict().items()}
        for name, one in self.candidates.items():
            state |= prefixed(name, one._state())
        return state

    def _varies(self, name: str) -> bool:
        owner, _, own = name.partition(".")
        return owner == "memory" or (owner in self.candidates and self.candidates[owner]._varies(own))

    def _load(self, state: dict[str, Tensor]) -> None:
        at = _Counters(**{name: int(state[name]) for name in vars(self._at)})
        at.check(len(self.names))
        windows = {name: to_host(state[f"memory.{name}"]) for name in self._windows}
        plain, n = windows.pop(PLAIN), windows[NONE].size
        fits = plain.shape == (n, self._classes) and all(one.ndim == 1 and len(one) <= n for one in windows.values())
        if not fits or any(((one < 0) | (one >= self._classes)).any() for one in (plain, *windows.values())):
            raise ValueError("state of Auto: its windows do not fit together")
        before = {name: one.state_dict() for name, one in self.candidates.items()}
        try:
            for name, one in self.candidates.items():
                one.load_state_dict(_of(name, state))
            if self.drift is not None:
                self.drift.load_state_dict({name: to_host(value) for name, value in _of("memory.drift", state).items()})
        except ValueError:
            for name, one in self.candidates.items():
                one.load_state_dict(before[name])
            raise
        self._at, self._windows = at, {**windows, PLAIN: plain}


def _of(owner: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a state that belongs to a candidate, or to the drift test."""
    start = f"{owner}."
    return {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
