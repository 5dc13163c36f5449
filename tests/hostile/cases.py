"""Hostile replies by name: the kind of request, what the node makes of an honest reply, and what the reason says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import Error, Message, MetricRecord, RecordDict

from fedtta.messages.flower import CONTENT, SECRET, bytes_record, reply_message, request_of, secret_of, to_content
from fedtta.messages.replies import Evaluated, EvaluationResult, Reply
from fedtta.messages.requests import Adapt, Evaluate, Identify, RefineRates, Request, Summarize, Train
from tests.hostile.clients import Attack, honest
from tests.hostile.superlink import Pushed, made, pushed, rebuilt, reply_to
from tests.messages.test_arrays import HOSTILE as BAD_ARRAYS
from tests.messages.test_blocks import HOSTILE as BAD_BLOCKS

#: name → kind of request, attack, what the reason says.
Case = tuple[type[Request], Attack, str]
CASES: dict[str, Case] = {}


def case(kind: type[Request], name: str, attack: Attack, told: str) -> None:
    CASES[f"{kind.kind.rpartition('.')[2]}: {name}"] = kind, attack, told


def loose(reply: Reply, message: Message) -> Message:
    """A reply whose arrays are objects of their own, which the server reads as it reads a block."""
    return Message(to_content(reply.to_record(), secret_of(message.content)), reply_to=message)


def changed(**changes: Any) -> Attack:
    """The honest reply with other fields."""
    return lambda message, reply: replace(reply, **changes)


def with_values(change: Callable[[dict[str, Any]], Any]) -> Attack:
    """The honest reply with other JSON; a text is sent as it is."""

    def attack(message: Message, reply: Reply) -> Pushed:
        content = reply_message(reply, message).content
        values = json.loads(str(content.config_records["config"][CONTENT]))
        made_of = change(values)
        content.config_records["config"][CONTENT] = (
            made_of if isinstance(made_of, str) else json.dumps(values if made_of is None else made_of)
        )
        return reply_to(message, content)

    return attack


def with_content(change: Callable[[RecordDict], object]) -> Attack:
    """The honest reply with other records."""

    def attack(message: Message, reply: Reply) -> Pushed:
        content = loose(reply, message).content
        change(content)
        return reply_to(message, content)

    return attack


def with_object(
    kind: str, content: Callable[[str, list[str], bytes], bytes], reply_of: Callable[[Reply, Message], Message] = loose
) -> Attack:
    """The honest reply in which the first object of a kind has other bytes: of its kind, children and body."""

    def attack(message: Message, reply: Reply) -> Pushed:
        honestly = pushed(reply_of(reply, message))
        name = next(key for key, value in honestly.objects.items() if value.startswith(f"{kind} ".encode()))
        head, _, body = honestly.objects[name].partition(b"\0")
        children = head.decode().split(" ")[1]
        return rebuilt(honestly, name, content(kind, children.split(",") if children else [], body))

    return attack


def with_arrays(change: Callable[[dict[str, np.ndarray]], object], field: str = "arrays") -> Attack:
    """The honest reply with other arrays."""

    def attack(message: Message, reply: Reply) -> Reply:
        arrays = {name: np.array(value) for name, value in getattr(reply, field).items()}
        change(arrays)
        return replace(reply, **{field: arrays})

    return attack


def first(value: Any, name: str = "") -> Callable[[dict[str, np.ndarray]], object]:
    """Set the first number of an array, or of the first one."""

    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[name or next(iter(arrays))].flat[0] = value

    return change


def withheld(message: Message, reply: Reply) -> Pushed:
    """A reply that is announced, and whose own object never comes."""
    honestly = pushed(reply_message(reply, message))
    return replace(honestly, withheld={honestly.message})


def failure(reason: str) -> Attack:
    return lambda message, reply: pushed(Message(Error(code=2, reason=reason), reply_to=message))


# -- decoding

for label, data in BAD_ARRAYS.items():
    case(
        Train, label, with_object("ArrayChunk", lambda kind, _, body, data=data: made(kind, [], data)), "cannot be read"
    )
for label, data in BAD_BLOCKS.items():
    case(
        Train,
        f"block: {label}",
        with_object("ArrayChunk", lambda kind, _, body, data=data: made(kind, [], data), reply_message),
        "cannot be read",
    )
case(
    Train,
    "one chunk listed a million times",
    with_object(
        "Array",
        lambda kind, children, body: made(
            kind, children, json.dumps({**json.loads(body), "arraychunk_ids": [0] * 1_000_000}).encode()
        ),
    ),
    "arrays of more than",
)
case(
    Train,
    "a chunk that is not there",
    with_object(
        "Array",
        lambda kind, children, body: made(
            kind, children, json.dumps({**json.loads(body), "arraychunk_ids": [7]}).encode()
        ),
    ),
    "cannot be read: IndexError",
)
case(
    Train,
    "an array that is no JSON",
    with_object("Array", lambda kind, children, _: made(kind, children, b"[")),
    "Expecting",
)
case(
    Train,
    "an array of nested lists",
    with_object("Array", lambda kind, children, _: made(kind, children, b"[" * 100_000)),
    "cannot be read: RecursionError",
)
case(
    Train,
    "an array that is a list",
    with_object("Array", lambda kind, children, _: made(kind, children, b"[]")),
    "cannot be read: TypeError",
)
case(
    Train,
    "an object of an unknown class",
    with_object("ArrayRecord", lambda _, children, body: made("Pickle", children, body)),
    "cannot be read: KeyError",
)
case(Train, "an object without a head", with_object("ArrayRecord", lambda *_: b"ArrayRecord"), "not enough values")
case(
    Train,
    "an object that says another class",
    with_object("RecordDict", lambda _, children, body: made("MetricRecord", children, body)),
    "do not have children",
)
case(
    Train,
    "records that are no protobuf",
    with_object("ConfigRecord", lambda kind, children, _: made(kind, children, b"\xff" * 9)),
    "cannot be read: DecodeError",
)
case(
    Train,
    "a message that is no protobuf",
    with_object("Message", lambda kind, children, _: made(kind, children, b"\xff" * 9)),
    "cannot be read: DecodeError",
)
case(
    Train,
    "a message without content",
    with_object("Message", lambda kind, _, body: made(kind, [], body)),
    "cannot be read: IndexError",
)
case(Train, "values of nine megabytes", with_values(lambda _: "9" * (9 << 20)), "allowed are at most")
case(Train, "values of five megabytes", with_values(lambda _: " " * (5 << 20) + "{}"), "values of")
case(
    Train,
    "a number of 100,000 digits",
    with_values(lambda _: f'{{"train-loss": {"9" * 100_000}}}'),
    "not JSON: Exceeds",
)
case(Train, "values in nested lists", with_values(lambda _: "[" * 100_000), "not JSON")
case(Train, "values in a list", with_values(lambda _: "[]"), "not list")
case(Train, "NaN in the values", with_values(lambda _: '{"train-loss": NaN}'), "NaN: allowed are finite")
case(
    Train,
    "another serialization",
    with_content(lambda content: setattr(next(iter(content.array_records["arrays"].values())), "stype", "pickle")),
    "made by 'pickle'",
)

# -- protocol: identify

for key in ("name", "classes", "sizes", "role"):
    case(Identify, f"without {key}", with_values(lambda values, key=key: values.pop(key) and None), key)
case(
    Identify,
    "a text in place of records",
    with_content(lambda content: content.config_records.clear()),
    "without the secret",
)
case(Identify, "a text in place of values", with_values(lambda _: '"cat"'), "not str")
case(Identify, "partition 9999", changed(name="9999"), "allowed are the names '0' to")
case(Identify, "partition -5", changed(name="-5"), "allowed are the names '0' to")
case(Identify, "a partition that another holds", changed(name="3"), "has this name, too")
case(Identify, "a name that is a path", changed(name="../../etc"), "name = ")
case(Identify, "sizes that are no triple", changed(sizes=[1, 2]), "sizes")
case(Identify, "sizes below zero", changed(sizes=[-1, 2, 3]), "sizes.0 = -1")
case(Identify, "sizes without end", changed(sizes=[10**30, 2, 3]), "sizes.0")
case(Identify, "sizes that are texts", changed(sizes=["1", "2", "3"]), "sizes.0")
case(Identify, "other classes", changed(classes=["cat"]), "classes = ['cat'], the run has")
case(Identify, "a million classes", changed(classes=["cat"] * 150_000), "classes")
case(Identify, "a billion channels", changed(channels=10**9), "channels")
case(Identify, "a role that is none", changed(role="judge"), "role")
case(Identify, "a role that does not fit", changed(role="target"), "role = 'target': btfl need clients that train")
case(Identify, "other images", changed(images=7), "has another")
case(Identify, "an unknown field", with_values(lambda values: values.update(surprise=1)), "surprise")
case(Identify, "a class with control characters", changed(classes=["\x1b[2J"] * 10), "printable")

# -- protocol: train

case(Train, "one extra metric", with_values(lambda values: values.update(surprise=1)), "unknown field 'surprise'")
case(
    Train,
    "a record of metrics",
    with_content(lambda content: content.metric_records.update({"metrics": MetricRecord({"surprise": 1})})),
    "records beside",
)
case(Train, "a loss of 1.7e308", changed(train_loss=1.7e308), "train-loss = 1.7e+308")
case(Train, "a loss below zero", changed(train_loss=-1.0), "train-loss = -1.0")
case(Train, "1e18 samples", changed(num_examples=10**18), "num-examples")
case(Train, "more samples than identified", changed(num_examples=21), "num-examples = 21, allowed is at most 20")
case(Train, "more right than there are", changed(validation_correct=11), "more than validation-total")
case(
    Train,
    "weights of 1e30",
    with_arrays(
        lambda arrays: [np.copyto(one, 1e30, casting="unsafe") for one in arrays.values() if one.dtype.kind == "f"]
    ),
    "times those of the median reply",
)
case(Train, "one weight of 1e30", with_arrays(first(1e30)), "numbers up to 1e+30")
case(Train, "a weight that is NaN", with_arrays(first(math.nan)), "not finite")
case(Train, "a weight that is infinite", with_arrays(first(math.inf)), "not finite")
case(
    Train,
    "an array of one number, which would be broadcast",
    with_arrays(lambda arrays: arrays.update({next(iter(arrays)): np.zeros(1, np.float32)})),
    "expected float32",
)
case(
    Train,
    "float64",
    with_arrays(lambda arrays: arrays.update({name: value.astype(np.float64) for name, value in arrays.items()})),
    "float64",
)
case(Train, "a missing array", with_arrays(lambda arrays: arrays.pop(next(iter(arrays)))), "missing arrays")
case(
    Train,
    "an extra array",
    with_arrays(lambda arrays: arrays.update(surprise=np.zeros(1))),
    "unknown arrays ['surprise']",
)
case(
    Train,
    "an array with control characters in its name",
    with_arrays(lambda arrays: arrays.update({"\x1b[2J": np.zeros(1)})),
    "printable characters",
)
case(
    Train,
    "two sets of arrays",
    with_content(lambda content: content.array_records.update({"others": bytes_record({"w": np.zeros(1)})})),
    "unknown arrays 'others'",
)
case(
    Train,
    "a reply of another kind",
    lambda message, _: honest(replace_kind(message, Identify), "0"),
    "arrays ['arrays'] are missing",
)
case(
    Train,
    "a count that is a truth value",
    with_values(lambda values: values.update({"num-examples": True})),
    "num-examples",
)
case(Train, "texts that are numbers", with_values(lambda values: values.update(seconds="1")), "seconds")
case(Train, "an error that moves the cursor", failure("\x1b[2J<script>alert(1)</script>" + "x" * 10_000), "<script>")
case(
    Train, "no secret", with_content(lambda content: content.config_records["config"].pop(SECRET)), "without the secret"
)
case(
    Train,
    "another secret",
    with_content(lambda content: content.config_records["config"].update({SECRET: "0" * 32})),
    "without the secret",
)
case(Train, "a reply that is announced and never sent", withheld, "announced, but not sent within 25 s")
case(Train, "no reply", lambda *_: None, "no reply within 25 s")

# -- protocol: statistics and rates

case(Summarize, "a descriptor of -1e9", with_arrays(first(-1e9, "descriptor"), "statistics"), "descriptor: values")
case(Summarize, "a DLE of 2", with_arrays(first(2.0, "dle"), "statistics"), "dle: values from")
case(Summarize, "an entropy below zero", with_arrays(first(-1.0, "entropy_local"), "statistics"), "entropy_local")
case(
    Summarize,
    "a missing statistic",
    with_arrays(lambda arrays: arrays.pop("dle"), "statistics"),
    "missing arrays ['dle']",
)
case(
    Summarize,
    "a statistic that was not asked for",
    with_arrays(lambda arrays: arrays.update(label_prior=np.full(10, 0.1)), "statistics"),
    "unknown arrays",
)
case(RefineRates, "a rate that is NaN", with_arrays(first(math.nan), "rates"), "not finite")
case(RefineRates, "a rate of 1e30", with_arrays(first(1e30), "rates"), "numbers up to 1e+30")
case(RefineRates, "more right than there are", changed(correct=99), "correct = 99")
case(RefineRates, "a loss of 1.7e308", changed(loss=1.7e308), "loss")

# -- protocol: evaluate


def results(change: Callable[[list[EvaluationResult]], list[EvaluationResult]]) -> Attack:
    def attack(message: Message, reply: Reply) -> Reply:
        assert isinstance(reply, Evaluated)
        return replace(reply, results=change(reply.results))

    return attack


case(
    Evaluate, "a leak", changed(leaked=1), "leaked = 1 of 10 test samples had been trained on; most clients report none"
)
case(Evaluate, "more leaks than samples", changed(leaked=11), "leaked = 11")
case(Evaluate, "an unknown result", results(lambda found: [*found, replace(found[0], label="mine")]), "unknown results")
case(Evaluate, "a missing result", results(lambda found: found[1:]), "missing results")
case(Evaluate, "a doubled result", results(lambda found: [*found, found[0]]), "doubled results")
case(
    Evaluate,
    "more right than there are",
    results(lambda found: [replace(found[0], correct=11), *found[1:]]),
    "more than",
)
case(
    Evaluate,
    "a total of 1e18",
    results(lambda found: [replace(found[0], total=10**18, correct=10**18), *found[1:]]),
    "results.0.correct",
)
case(
    Evaluate,
    "a metric that says which event it is",
    results(lambda found: [replace(found[0], metrics={"event": 1.0}), *found[1:]]),
    "cannot be called event",
)
case(
    Evaluate,
    "a metric without a name",
    results(lambda found: [replace(found[0], metrics={"": 1.0}), *found[1:]]),
    "metrics",
)

# -- protocol: test-time rounds

case(Adapt, "corruption 99", changed(corruption=99), "corruption = 99")
case(Adapt, "counts of other classes", changed(correct=[1]), "expected 10 counts")
case(Adapt, "counts that do not fit", changed(total=[2] * 10), "do not fit each other")
case(Adapt, "shared arrays of another shape", changed(shared={"gamma": np.ones(4, np.float32)}), "shared: ")
case(Adapt, "shared arrays of 1e30", changed(shared={"gamma": np.full(3, 1e30, np.float32)}), "numbers up to 1e+30")
case(Adapt, "no shared arrays", with_content(lambda content: content.array_records.pop("shared")), "are missing")
case(
    Adapt,
    "a variance below zero",
    changed(normalization={"bn.mean": np.zeros(3), "bn.variance": -np.ones(3)}),
    "bn.variance",
)


def replace_kind(message: Message, kind: type[Request]) -> Request:
    """A request of another kind."""
    request = request_of(message)
    return kind(settings=request.settings, run=request.run)
