"""auto: choose among adapters without labels, by what each is estimated to gain over not adapting.

There is no paper. The estimate is `label_shift` (`fedtta.tta.estimates`): v_a is the probability that the unadapted
network gives to the class which candidate a predicts, after the class shares of the last W samples have been estimated
again; c_a is whether a is right. Calibrated on the client's validation split,

    gain(a) = mean of (v_a - v_none) over the last W samples + mean of ((c_a - v_a) - (c_none - v_none)) over validation

Both are means of differences on the same samples: what the estimate gets wrong about both alike cancels. The choice is
the candidate with the largest

    gain(a) - caution · its standard error,

and "none" where that is not above `margin` for any: it takes evidence to leave "none". The unadapted network is the
judge: where it is hardly better than chance, so is the choice, and nothing here finds that out.

1. Probe: over W samples all candidates predict. The choice is made again after each batch, and from that batch on its
   predictions are the choice's; no later sample is looked at.
2. Then "none" and the choice alone go on, and "none" takes over again as soon as the rule says so.
3. A probe begins again after `every` samples, or with the batch after one in which the drift test (`fedtta.tta.drift`),
   on outputs of the unadapted network, finds a change. All candidates but the choice are reset then, as they were for
   their calibration.

Cost: one forward pass a sample serves "none", the heads, FedTHE, BTFL, T3A, EM, BBSE and kNN-Per together. With the
others' passes f_a a sample it is 1 + Σ f_a in a probe and 1 + f_choice outside: at most 1 + max f_a + (W / every) Σ f_a
over a long stream without drift.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedtta.tta.arrays import to_host
from fedtta.tta.base import Adapter, prefixed
from fedtta.tta.checks import check_finite, check_least, check_number, class_count
from fedtta.tta.drift import DriftTest, outputs
from fedtta.tta.estimates import Calibration, Signals, calibrated, judged, slid, with_new_shares
from fedtta.tta.registry import LIGHT

if TYPE_CHECKING:
    from numpy.typing import NDArray

NONE = "none"
PLAIN = "unadapted"  # the window of the unadapted probabilities; the others hold predicted classes
#: Adapters that need no more of a network than its outputs.
OF_OUTPUTS = (*LIGHT, "knn_per")
#: Candidates by default: those whose statistics do not tell a client's class counts.
USUAL = (NONE, "personal", "fixed_mix", "fedthe", "btfl", "t3a", "bn_adapt")


@dataclass(frozen=True)
class Candidate:
    """An adapter that may be chosen.

    Parameters
    ----------
    make : callable
        Makes a new one for a network.
    gain : Calibration
        Of v_a - v_none and c_a - c_none.
    """

    make: Callable[[nn.Module], Adapter]
    gain: Calibration


def calibrate_candidates(
    makers: Mapping[str, Callable[[nn.Module], Adapter]],
    predicted: Mapping[str, NDArray[Any]],
    correct: Mapping[str, NDArray[Any]],
) -> dict[str, Candidate]:
    """Return the candidates, given what new ones predict for the same labelled samples.

    Parameters
    ----------
    makers : mapping
        Name → what makes the adapter; "none" is among them.
    predicted : mapping
        Name → probabilities [n, K], n at least 1.
    correct : mapping
        Name → whether they are right, bool [n].
    """
    posterior = with_new_shares(predicted[NONE])
    missed = {name: correct[name] - judged(posterior, predicted[name].argmax(1)) for name in makers}
    return {name: Candidate(make, calibrated(missed[name] - missed[NONE], least=-2)) for name, make in makers.items()}


class _Once(nn.Module):
    """A network whose outputs for a batch are computed once, however many adapters ask for them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.forget()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("network"), name)

    def forget(self) -> None:
        """Forget the outputs: a batch may be another one at the same place in memory."""
        self._x: Tensor | None = None
        self._z: Tensor | None = None

    def features(self, x: Tensor) -> Tensor:
        """Return z [B, d]."""
        if self._x is not x or self._z is None:
            self._x, self._z = x, self.network.features(x)  # type: ignore[operator]
        return self._z

    def forward(self, x: Tensor) -> Tensor:
        """Return the global head's logits [B, K]."""
        logits: Tensor = self.network.head(self.features(x))  # type: ignore[operator]
        return logits


class Auto(Adapter):
    """Predict with the adapter that is estimated to gain most over not adapting (see the module).

    Parameters
    ----------
    model : nn.Module
        A network with `features` and `head` (`fedtta.models.TwoHead`).
    candidates : mapping
        Name → candidate, "none" among them.
    among : str
        Names of the candidates, as "none+fedthe+tent"; all of them must be in `candidates`. Empty: those of `USUAL`
        that fit the network.
    probe : int
        W, samples.
    every : int
        Samples from the begin of a probe to that of the next, at least W; 0: no further one without drift.
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
    per = "batch"
    needs = frozenset({"candidates", "personal_head", "descriptor", "dle", "entropy"})

    def __init__(
        self,
        model: nn.Module,
        candidates: Mapping[str, Candidate],
        *,
        among: str = "",
        probe: int = 100,
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
        wanted = [name for name in among.split("+") if name] or list(candidates)
        if missing := sorted({NONE, *wanted} - set(candidates)):
            raise ValueError(f"auto: {', '.join(missing)} not calibrated; there are: {', '.join(candidates)}")
        super().__init__(model, record=record)
        self.names = (NONE, *(name for name in dict.fromkeys(wanted) if name != NONE))
        self.probe, self.every, self.caution, self.margin = probe, every, caution, margin
        self.drift = DriftTest(false_alarms=false_alarms) if false_alarms else None
        self._once = _Once(model).eval()
        self._classes = class_count(model, None)
        self._gains = {name: candidates[name].gain for name in self.names}
        self.candidates = {
            name: candidates[name].make(self._once if name in OF_OUTPUTS else model) for name in self.names
        }
        self._choice, self._seen, self._drifted, self._windows = 0, 0, False, self._no_windows()
        self.reset()

    @property
    def choice(self) -> str:
        """Return the name of the present choice."""
        return self.names[self._choice]

    def _predict(self, x: Tensor) -> Tensor:
        self._once.forget()
        check_finite("the network's output", torch.cat([self._once.features(x), self._once(x)], 1))
        if len(x) == 0:
            return self.candidates[NONE].predict(x)
        if self._drifted or 0 < self.every <= self._seen:
            self._begin_probe()
        running = self.names if self._seen < self.probe else tuple(dict.fromkeys((NONE, self.choice)))
        rows = torch.stack([self.candidates[name].predict(x) for name in running])  # [candidates, B, K]
        self._once.forget()
        known = to_host(rows).astype(np.float64)
        batch = dict(zip(running, known.argmax(2).astype(np.float64), strict=True)) | {PLAIN: known[0]}
        # a candidate that pauses loses its window: what it missed would be another stream's
        self._windows = {**self._no_windows(), **slid(self._windows, batch, self.probe)}
        self._seen += len(x)
        self._drifted = self.drift is not None and bool(self.drift.update(outputs(known[0])))
        best = self._best(running)
        self._choice = self.names.index(best)
        self._note(choice=torch.full((len(x),), self._choice, dtype=torch.int64))
        return rows[running.index(best)]

    def _begin_probe(self) -> None:
        for name in self.names:
            if name not in (NONE, self.choice):
                self.candidates[name].reset()
        self._windows, self._seen, self._drifted = self._no_windows(), 0, False

    def _no_windows(self) -> Signals:
        return {name: np.empty(0) for name in self.names} | {PLAIN: np.empty((0, self._classes))}

    def _best(self, running: tuple[str, ...]) -> str:
        """Return the running candidate with the largest cautious gain over "none", or "none"."""
        best, most = NONE, self.margin
        posterior = with_new_shares(self._windows[PLAIN])
        none = judged(posterior, self._windows[NONE])
        for name in running[1:]:
            more = judged(posterior, self._windows[name]) - none
            gain, error = self._gains[name].corrected(more, least=-1)
            if gain - self.caution * error > most:
                best, most = name, gain - self.caution * error
        return best

    def _reset(self) -> None:
        for one in self.candidates.values():
            one.reset()
        if self.drift is not None:
            self.drift.reset()
        self._choice = 0
        self._begin_probe()

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "choice": np.array(self._choice), "seen": np.array(self._seen), "drifted": np.array(int(self._drifted)),
        }  # fmt: skip
        state |= {f"memory.{name}": values for name, values in self._windows.items()}
        if self.drift is not None:
            state |= {f"memory.drift.{name}": value for name, value in self.drift.state_dict().items()}
        for name, one in self.candidates.items():
            state |= prefixed(name, one.state_dict())
        return state

    def _varies(self, name: str) -> bool:
        owner, _, own = name.partition(".")
        return owner == "memory" or (owner in self.candidates and self.candidates[owner]._varies(own))

    def _load(self, state: dict[str, Tensor]) -> None:
        choice = int(state["choice"])
        if not 0 <= choice < len(self.names):
            raise ValueError(f"state 'choice' of Auto is {choice}: there are {len(self.names)} candidates")
        windows = {name: to_host(state[f"memory.{name}"]) for name in self._windows}
        plain, n = windows.pop(PLAIN), len(windows[NONE])
        fits = plain.shape == (n, self._classes) and all(one.shape in ((0,), (n,)) for one in windows.values())
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
        self._choice, self._seen, self._drifted = choice, int(state["seen"]), bool(state["drifted"])
        self._windows = {**windows, PLAIN: plain}


def _of(owner: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a state that belongs to a candidate, or to the drift test."""
    start = f"{owner}."
    return {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
