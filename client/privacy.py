"""A client's part in secure aggregation and differential privacy: what is done to a reply before it leaves.

The client checks what it can check itself: secrets are used for one sum, a sum has enough members, and of each member
either the shares of its own mask or those of its masks with others are revealed, never both. So a server that follows
the protocol, and all that reads what it stores, learns sums only. What a client cannot check is whether the other
members are clients: a server that invents most of them learns the reply.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedtta.client.state import PrivateState
from fedtta.messages.replies import Identity, Reply, SharedKeys, Summarized, Trained, Unmasked
from fedtta.messages.requests import RefineRates, Request, ShareKeys, Summarize, Train, Unmask
from fedtta.privacy import masking
from fedtta.privacy.gaussian import Mechanism, Privacy, Values, clipped, noised
from fedtta.privacy.sharing import SHARE, fingerprint, split
from fedtta.privacy.sums import AGGREGATED, Aggregated, Masked, common_part, to_vector
from fedtta.tta.statistics import STATISTICS

if TYPE_CHECKING:
    from fedtta.client.device import Device

LEAST = 3  # members of a sum: with two each learns the other's reply
ENTRY, KEY_ENTRY = "secure-sum", "secure-key"  # keys in private state
VARIANCE = "running_var"


@dataclass(frozen=True)
class Session:
    """A client's secrets of one secure sum, and how far it has come.

    Parameters
    ----------
    session, own, members, threshold
        See `ShareKeys`.
    peers : list of str
        The members' public keys.
    private, seed : str
        Masking key, and seed of the client's own mask, in hexadecimal digits.
    step : "shared", "masked" or "revealed"
    masked : list of int
        Members whose masks the reply has.
    """

    session: str
    own: int
    members: list[int]
    threshold: int
    peers: list[str]
    private: str
    seed: str
    step: str = "shared"
    masked: list[int] | None = None

    def save(self, state: PrivateState) -> None:
        """Store it, in place of the last one: secrets of a session that is over cannot be used again."""
        text = json.dumps(asdict(self)).encode()
        state.save(ENTRY, 0, {"json": np.frombuffer(text, np.uint8)})

    @classmethod
    def load(cls, state: PrivateState, session: str, step: str) -> Session:
        """Return the session; ValueError unless it is the last one, and at this step."""
        entry = state.load(ENTRY, 0)
        found = None if entry is None else cls(**json.loads(entry["json"].tobytes()))
        if found is None or found.session != session or found.step != step:
            raise ValueError(f"secure sum {session[:8]!r}: this client has no secrets for it, or has used them")
        return found


def mask_key(state: PrivateState) -> bytes:
    """Return the client's private key, which is made when it is first asked for; one for each run."""
    entry = state.load(KEY_ENTRY, 0)
    if entry is None:
        entry = {"private": np.frombuffer(masking.new_secret(), np.uint8)}
        state.save(KEY_ENTRY, 0, entry)
    return entry["private"].tobytes()


def share_keys(device: Device, request: ShareKeys) -> SharedKeys:
    """Make the secrets of a sum and deal their shares.

    Raises
    ------
    ValueError
        There are too few members, or a threshold under which both kinds of shares could be gathered, or this client is
        not among the members.
    """
    own, members, own_key = request.own, request.members, mask_key(device.memory)
    peers = dict(zip(members, map(bytes.fromhex, request.keys), strict=False))
    if len(set(members)) != len(request.keys) or len(set(request.keys)) != len(members) or len(members) < LEAST:
        raise ValueError(f"a secure sum has at least {LEAST} members with different keys")
    if min(members) < 1 or peers.get(own) != masking.public_key(own_key):
        raise ValueError("this client's key is not among those of the members")
    if not len(members) / 2 < request.threshold <= len(members):
        raise ValueError(f"threshold = {request.threshold}: allowed is more than half of {len(members)} members")
    private, seed = masking.new_secret(), masking.new_secret()
    key_shares, seed_shares = (split(one, request.threshold, members) for one in (private, seed))
    dealt = [
        masking.seal(
            masking.shared_key(own_key, peers[to], f"share {request.session}"),
            key_share + seed_share,
            _about(request.session, own, to),
        ).hex()
        for to, key_share, seed_share in zip(members, key_shares, seed_shares, strict=True)
    ]
    told = Session(request.session, own, members, request.threshold, request.keys, private.hex(), seed.hex())
    told.save(device.memory)
    return SharedKeys(
        key=masking.public_key(private).hex(),
        shares=dealt,
        key_digests=[fingerprint(share) for share in key_shares],
        seed_digests=[fingerprint(share) for share in seed_shares],
        seed_digest=fingerprint(seed),
    )


def unmask(device: Device, request: Unmask) -> Unmasked:
    """Reveal one share of each member: of its own mask if it survived, else of its masks with others.

    Raises
    ------
    ValueError
        The session is not the last one or was revealed already, or fewer members survive than its threshold.
    """
    found = Session.load(device.memory, request.session, "masked")
    survivors = set(request.survivors)
    if not survivors <= set(found.masked or ()) or found.own not in survivors or len(survivors) < found.threshold:
        raise ValueError(f"secure sum {request.session[:8]!r}: too few members survive, or others than were asked")
    replace(found, step="revealed").save(device.memory)  # before anything leaves
    own_key, revealed = mask_key(device.memory), []
    for member, peer, sealed in zip(found.members, found.peers, request.shares, strict=True):
        both = b""
        with contextlib.suppress(ValueError):  # that member's share is missing, the others' are not
            key = masking.shared_key(own_key, bytes.fromhex(peer), f"share {request.session}")
            both = masking.unseal(key, bytes.fromhex(sealed), _about(request.session, member, found.own))
        revealed.append((both[SHARE:] if member in survivors else both[:SHARE]).hex())
    return Unmasked(shares=revealed)


def protect(device: Device, request: Request, reply: Reply) -> Reply:
    """Return a reply as it may leave: clipped, with noise, masked, as the run's settings say; else unchanged.

    Raises
    ------
    ValueError
        Secure aggregation is on and the request has no secrets that can be used, or a value cannot be summed.
    """
    settings = device.settings
    if not (settings.secure_aggregation or settings.differential_privacy):
        return reply
    if isinstance(reply, Identity):  # which classes a client lacks must not be told beside the sums
        key = masking.public_key(mask_key(device.memory)).hex() if settings.secure_aggregation else None
        return replace(reply, mask_key=key, classes_present=None, notes=[])
    if not isinstance(request, Train | Summarize | RefineRates):
        return reply
    how = AGGREGATED[type(reply)]
    mechanism = Privacy.parse(settings.differential_privacy).mechanisms.get(how.releases)
    if mechanism is not None:
        reply = _without_metrics(reply, how)
    if not settings.secure_aggregation:
        return reply if mechanism is None else _noisy(device, request, reply, mechanism)
    if request.masking is None:
        raise ValueError("secure-aggregation is on: a request without it is not answered")
    session = Session.load(device.memory, request.masking.session, "shared")
    bound = settings.update_norm_bound if mechanism is None else 0.0
    arrays = _bounded(device, request, reply, mechanism, bound)
    words = _masked(session, request, reply, arrays, mechanism)
    replace(session, step="masked", masked=request.masking.members).save(device.memory)
    empty: dict[str, Any] = {how.arrays: {}, "num_examples": 1, "masked": {"sum": words}}
    return replace(_without_metrics(reply, how), **empty)


def _masked(
    session: Session, request: Masked, reply: Reply, arrays: Values, mechanism: Mechanism | None
) -> NDArray[np.uint64]:
    """Return the vector of a reply under all masks."""
    asked = request.masking
    assert asked is not None, "checked by the caller"
    if not set(asked.members) <= set(session.members) or session.own not in asked.members:
        raise ValueError("masks are asked for with clients that are no members")
    if len(asked.members) < session.threshold or len(set(asked.keys)) != len(set(asked.members)):
        raise ValueError(f"{len(asked.members)} members are left, {session.threshold} are needed")
    weighted = asked.weighting == "examples"
    weight = min(reply.num_examples, asked.most) if weighted else 1
    if mechanism is not None:  # the noise of the members that must survive adds up to that of the mechanism
        scale = (asked.most if weighted else 1) / weight / math.sqrt(session.threshold)
        arrays = _with_noise(type(reply), arrays, mechanism, scale)
    bits = masking.fraction_bits(asked.clients, asked.most)
    words = masking.encode(to_vector(reply, arrays, weight), bits, asked.most)
    words = words + masking.mask(bytes.fromhex(session.seed), len(words))
    others = [(n, bytes.fromhex(key)) for n, key in zip(asked.members, asked.keys, strict=True) if n != session.own]
    private = bytes.fromhex(session.private)
    return words + masking.pair_masks(private, session.own, others, common_part(request), len(words))


def _noisy(device: Device, request: Request, reply: Reply, mechanism: Mechanism) -> Reply:
    """Return a reply with clipped and noisy arrays, in their dtypes."""
    how = AGGREGATED[type(reply)]
    sent: Mapping[str, NDArray[Any]] = getattr(reply, how.arrays)
    arrays = _with_noise(type(reply), _bounded(device, request, reply, mechanism), mechanism)
    if isinstance(reply, Trained):  # noise must leave a network that can be evaluated
        arrays = {n: np.maximum(value, 0) if n.endswith(VARIANCE) else value for n, value in arrays.items()}
    changes: dict[str, Any] = {how.arrays: {name: value.astype(sent[name].dtype) for name, value in arrays.items()}}
    return replace(reply, **changes)


def _bounded(device: Device, request: Request, reply: Reply, mechanism: Mechanism | None, bound: float = 0.0) -> Values:
    """Return a reply's arrays in float64, no further from the reference than the mechanism or `bound` allows."""
    arrays: Mapping[str, NDArray[Any]] = getattr(reply, AGGREGATED[type(reply)].arrays)
    limit = mechanism.clip if mechanism else bound
    if odd := [name for name, value in arrays.items() if value.dtype.kind != "f"]:
        raise ValueError(f"{odd[0]}: only floating-point numbers can be summed or get noise")
    if not limit or (isinstance(reply, Summarized) and mechanism is None):
        return {name: value.astype(np.float64) for name, value in arrays.items()}
    reference = _reference(device, request, arrays)
    change = {name: value - reference[name] for name, value in arrays.items()}
    if isinstance(reply, Summarized):  # each array by itself, root mean square
        bounded = {n: clipped({n: one}, limit * math.sqrt(one.size))[n] for n, one in change.items()}
    else:
        bounded = clipped(change, limit)
    return {name: reference[name] + value for name, value in bounded.items()}


def _reference(device: Device, request: Request, arrays: Mapping[str, NDArray[Any]]) -> Values:
    """Return what a contribution's distance is measured from: what was sent, or the middle of a statistic's range."""
    if isinstance(request, Train):
        return {name: request.arrays[name].astype(np.float64) for name in arrays}
    if isinstance(request, RefineRates):
        return {name: np.asarray(request.rates.get(name, 0.0), np.float64) for name in arrays}
    return {name: np.full(value.shape, middle(name, value.size, device)) for name, value in arrays.items()}


def middle(name: str, size: int, device: Device) -> float:
    """Return the middle of a statistic's range; 0 where there is none."""
    statistic = STATISTICS[name]
    if statistic.distribution:
        return 1 / size
    if statistic.need == "entropy":
        return math.log(device.model.num_classes) / 2
    return (statistic.low + statistic.high) / 2 if math.isfinite(statistic.high) else 0.0


def _with_noise(kind: type[Reply], arrays: Values, mechanism: Mechanism, scale: float = 1.0) -> Values:
    """Add a mechanism's noise, times `scale`; statistics are several arrays with a bound each."""
    std = mechanism.noise * mechanism.clip * scale
    if kind is not Summarized:
        return noised(arrays, std)
    found: Values = {}
    for name, value in arrays.items():
        found |= noised({name: value}, std * math.sqrt(len(arrays) * value.size))
    return found


def _without_metrics(reply: Reply, how: Aggregated) -> Reply:
    """Return a reply without its loss and counts, which would tell what noise or masks hide."""
    empty: dict[str, Any] = {name: 0 for name in how.counts if getattr(reply, name) is not None}
    if how.loss:
        empty[how.loss] = 0.0
    if isinstance(reply, Trained):
        empty["global_loss"] = None
    return replace(reply, **empty)


def _about(session: str, dealer: int, receiver: int) -> str:
    """Return what a sealed share is bound to."""
    return f"{session} from {dealer} to {receiver}"
