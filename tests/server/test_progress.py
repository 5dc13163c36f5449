"""Progress as a person sees it where the output is a file."""

import io

from rich.console import Console

from fedtta.server.events import Events
from fedtta.server.progress import TerminalProgress


def test_a_line_a_round_with_speed_and_time_left_in_a_file() -> None:
    text = io.StringIO()
    with TerminalProgress(Console(file=text, width=200)) as progress:
        events = Events(progress)
        events("plan", steps=4)
        events("run", settings={"local-epochs": 5})
        events("clients", sizes=[[100, 1, 1], [60, 1, 1]])
        events("phase", name="train", total=2)
        events("answered", phase="train", partition=0)
        events("failed", phase="train", round=1, partition=1, reason="[disk] full")
        events("round", training="ce", round=1, replied=[0], wall_seconds=2.0, train_loss=1.5, validation_accuracy=0.25)
        events("note", text="careful")
        events("unheard-of")
    lines = text.getvalue().splitlines()
    assert "failed train, round 1, client 1: [disk] full" in lines[0]
    assert lines[1].startswith("[1/4] ce round 1  loss 1.500  250 images/s  val 25.0 %")  # 100 · 5 / 2
    assert lines[2] == "note: careful"


def test_clients_are_called_by_their_names() -> None:
    text = io.StringIO()
    with TerminalProgress(Console(file=text, width=200)) as progress:
        events = Events(progress)
        events("clients", sizes=[[100, 1, 1], [60, 1, 1]], names=["site-a", "site-b"])
        events("left", partition=1, node_id=7)
        events("joined", partition=2, name="ward", sizes=[30, 2, 1], role="both", node_id=9)
        events("left_alone", node_id=5, name=None, reason="[x] no")
        events("failed", phase="train", round=1, partition=2, reason="disk full")
        events("round", training="ce", round=1, replied=[2], wall_seconds=2.0, train_loss=1.5, validation_accuracy=None)
        events("rejoined", partition=1, node_id=8)
        events("served", partition=2, served="refused: worse")
    lines = text.getvalue().splitlines()
    assert lines[:4] == [
        "left client site-b: node 7 is no longer connected",
        "joined client ward: 30 samples to train, 2 to validate, 1 to test, role both",
        "left alone node 5: [x] no",
        "failed train, round 1, client ward: disk full",
    ]
    assert "15 images/s" in lines[4]
    assert lines[5:] == ["rejoined client site-b: as node 8", "agent of client ward: refused: worse"]


def test_a_line_says_what_compressed_updates_saved_and_cost() -> None:
    text, about = io.StringIO(), {"replied": [0], "wall_seconds": 2.0, "train_loss": 1.5, "validation_accuracy": 0.25}
    with TerminalProgress(Console(file=text, width=200)) as progress:
        events = Events(progress)
        alone = {"trained_accuracy": 0.5, "decoded_accuracy": None}
        for cost in ({"trained_accuracy": 0.5, "decoded_accuracy": 0.498}, {}, alone):
            events("round", training="ce", round=1, bytes_up=27, bytes_up_float32=100, **about, **cost)
    first, *others = text.getvalue().splitlines()
    assert "val 25.0 %  up 27% at -0.2 points" in first
    assert all("val 25.0 %  up 27%" in other and "points" not in other for other in others)


def test_replies_that_are_limited_are_one_line_a_round() -> None:
    text = io.StringIO()
    with TerminalProgress(Console(file=text, width=200)) as progress:
        events = Events(progress)
        events("clients", sizes=[[9, 1, 1]] * 8, names=["site-a", "site-b", *"cdefgh"])
        for round, partitions in ((1, [1]), (2, [0, 1]), (3, range(8))):
            for partition in partitions:
                events("limited", phase="train", round=round, partition=partition, node_id=7, reason="[w] far")
            events("phase", name="train", total=8)
        events("limited", phase="train", round=4, partition=0, node_id=7, reason="far")
    assert text.getvalue().splitlines() == [
        "limited train, round 1, client site-b: [w] far",
        "limited train, round 2, clients site-a, site-b",
        "limited train, round 3, 8 clients",
        "limited train, round 4, client site-a: far",
    ]


def test_lines_of_rates_rounds_and_test_time_rounds() -> None:
    text = io.StringIO()
    with TerminalProgress(Console(file=text, width=200)) as progress:
        events = Events(progress)
        events("plan", steps=4)
        events("rates_round", training="ce", variant="all", round=7, loss=0.5, accuracy=0.75)
        events("rates_round", training="ce", variant="all", round=8, loss=None, accuracy=None)
        for round, correct in ((1, [1, 2]), (2, [4, 0])):
            for partition in (0, 1):
                events("adapted", partition=partition, correct=correct, total=[5, 3])
            events("adapt_round", method="tent", collaboration="pfedbbn", round=round, wall_seconds=0.5)
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("[1/4] rates ce (all) round 7  loss 0.500  accuracy 75.0 %")
    assert lines[1].startswith("[2/4] rates ce (all) round 8  loss hidden")
    # 2 clients of 8 images a round, 6 and then 8 right: each round counts by itself
    assert lines[2].startswith("[3/4] tent @ pfedbbn round 1  37.5 % of 16 images  32 images/s")
    assert lines[3].startswith("[4/4] tent @ pfedbbn round 2  50.0 % of 16 images  32 images/s")


def test_texts_of_nodes_move_no_cursor() -> None:
    text = io.StringIO()
    with TerminalProgress(Console(file=text, width=200)) as progress:
        events = Events(progress)
        events("failed", phase="train", round=1, partition=1, reason="\x1b[2J[red]no")
        events("served", partition=2, served="\u202eshadow")
        events("note", text="\x07ring")
    assert text.getvalue().splitlines() == [
        "failed train, round 1, client 1: \ufffd[2J[red]no",
        "agent of client 2: \ufffdshadow",
        "note: \ufffdring",
    ]
