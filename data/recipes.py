"""What test streams are made of: the recipes of BRFL (FedTHE, appendix D) and BTGFL (BTFL, section 5.1).

A recipe returns parts: (elementary shift, indices). What they have in common:

- Without repetition: no stream holds a picture twice, and the parts of a mixture come from different
  pictures.
- A client has 0.2 · 3,000 test pictures in the papers' set-up, but only about 100 of CIFAR-10.1's 2,000.
  Where equal parts are asked for and one of them has less, all parts are cut to it: parts stay equal, and the
  stream is shorter. A part that has nothing (a federation of one client has no other clients) leaves an empty
  stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .federation import Federation
from .images import Images
from .natural import deal
from .seeds import generator

#: One part of a stream: the elementary shift, and indices into the federation's pictures (or natural ones).
Part = tuple[str, np.ndarray]

#: Elementary shifts whose indices point into the natural data set.
NATURAL = ("natural", "natural_out_of_client")
#: Elementary shifts whose pictures are corrupted.
CORRUPTED = ("corrupted", "corrupted_out_of_client")


@dataclass(frozen=True)
class Client:
    """What a recipe may draw from, for one client: seeded random orders, the same for every recipe."""

    federation: Federation
    partition: int
    seed: int
    natural: Images | None

    @cached_property
    def own(self) -> np.ndarray:
        """The client's test split, shuffled."""
        return self._rng("own").permutation(self.federation.splits[self.partition].test)

    @cached_property
    def others(self) -> np.ndarray:
        """As many of the other clients' pooled test samples as the client has itself (or all there are)."""
        return self._rng("others").permutation(self.federation.others_test(self.partition))[: len(self.own)]

    @cached_property
    def unseen(self) -> np.ndarray:
        """The pictures of the domain that no client has, shuffled."""
        return self._rng("unseen").permutation(self.federation.unseen)

    @cached_property
    def natural_own(self) -> np.ndarray:
        """The client's share of the natural pictures, shuffled."""
        return self._rng("natural_own").permutation(self._dealt[self.partition])

    @cached_property
    def natural_others(self) -> np.ndarray:
        """The other clients' shares of the natural pictures, pooled and shuffled."""
        shares = [share for number, share in enumerate(self._dealt) if number != self.partition]
        return self._rng("natural_others").permutation(np.concatenate([np.empty(0, np.int64), *shares]))

    @cached_property
    def _dealt(self) -> list[np.ndarray]:
        if self.natural is None:
            return [np.empty(0, np.int64) for _ in self.federation.splits]
        return deal(self.federation.class_counts(), self.natural.labels, self.seed)

    def _rng(self, purpose: str) -> np.random.Generator:
        return generator("recipe", purpose, self.seed, self.partition)


def original(client: Client) -> list[Part]:
    """Take the client's test split as it is: distributed like its training data."""
    return [("original", client.own)]


def corrupted(client: Client) -> list[Part]:
    """Take the client's test split, each sample under one of the 15 common corruptions."""
    return [("corrupted", client.own)]


def natural(client: Client) -> list[Part]:
    """Take natural pictures with the class mix of the client's training split."""
    return [("natural", client.natural_own)]


def out_of_client(client: Client) -> list[Part]:
    """Take samples of the other clients' test splits, as many as the client's own."""
    return [("out_of_client", client.others)]


def corrupted_out_of_client(client: Client) -> list[Part]:
    """Take samples of the other clients' test splits, each under one of the 15 common corruptions."""
    return [("corrupted_out_of_client", client.others)]


def unseen_domain(client: Client) -> list[Part]:
    """Take the whole domain that no client has (FedICON's domain shift); nothing where there is none."""
    return [("unseen_domain", client.unseen)]


def mixture(client: Client) -> list[Part]:
    """Mix equal parts of original, corrupted, natural (where present) and out-of-client.

    A part is the client's test size divided by the number of parts (rounded down), or less where the natural
    or the out-of-client samples are fewer.
    """
    if client.natural is None:
        part = min(len(client.own) // 3, len(client.others))
    else:
        part = min(len(client.own) // 4, len(client.others), len(client.natural_own))
    parts = [
        ("original", client.own[:part]),
        ("corrupted", client.own[part : 2 * part]),
        ("out_of_client", client.others[:part]),
    ]
    return parts if client.natural is None else [*parts, ("natural", client.natural_own[:part])]


def shifted_ind(client: Client) -> list[Part]:
    """Shift the own distribution: half corrupted, half natural; without natural data all corrupted."""
    return _shifted(client, "", client.own, client.natural_own)


def shifted_exd(client: Client) -> list[Part]:
    """Shift the others' distribution: half corrupted, half natural; without natural data all corrupted."""
    return _shifted(client, "_out_of_client", client.others, client.natural_others)


def synthetical(client: Client) -> list[Part]:
    """Mix equal parts of original and shifted, internal and external; shifted is as in the sets of that name.

    A part is a quarter of the client's test size (rounded down; to an even number where it is halved), or
    less where the external or the natural samples are fewer.
    """
    part = min(len(client.own) // 4, len(client.others) // 2)
    if client.natural is not None:
        part = 2 * min(part // 2, len(client.natural_own), len(client.natural_others))
    return [
        ("original", client.own[:part]),
        ("out_of_client", client.others[:part]),
        *_shifted(client, "", client.own[part : 2 * part], client.natural_own),
        *_shifted(client, "_out_of_client", client.others[part : 2 * part], client.natural_others),
    ]


def _shifted(client: Client, suffix: str, samples: np.ndarray, natural: np.ndarray) -> list[Part]:
    """Corrupt `samples`; with a natural data set, only half of them, and as many natural ones beside them."""
    if client.natural is None:
        return [("corrupted" + suffix, samples)]
    half = min(len(samples) // 2, len(natural))
    return [("corrupted" + suffix, samples[:half]), ("natural" + suffix, natural[:half])]


@dataclass(frozen=True)
class Shift:
    """A named recipe; `needs_natural` says that it is nothing without a natural data set."""

    description: str
    recipe: Callable[[Client], list[Part]]
    needs_natural: bool = False


SHIFTS: dict[str, Shift] = {
    "original": Shift("the client's own test split", original),
    "corrupted": Shift("own test split, a random corruption a sample", corrupted),
    "natural": Shift("CIFAR-10.1 with the client's class mix", natural, needs_natural=True),
    "out_of_client": Shift("other clients' test samples", out_of_client),
    "mixture": Shift("equal parts of all of these", mixture),
    "corrupted_out_of_client": Shift(
        "other clients' test samples, a random corruption a sample", corrupted_out_of_client
    ),
    "original_ind": Shift("internal distribution: the client's own test split", original),
    "shifted_ind": Shift("internal distribution, corrupted or natural", shifted_ind),
    "original_exd": Shift("external distribution: other clients' test samples", out_of_client),
    "shifted_exd": Shift("external distribution, corrupted or natural", shifted_exd),
    "synthetical": Shift("equal parts of the four internal and external sets", synthetical),
    "unseen_domain": Shift("the domain that no client has", unseen_domain),
}
