"""Progress as a person sees it where the output is a file."""

import io

from rich.console import Console

from server.events import Events
from server.progress import TerminalProgress


def test_a_line_a_round_with_speed_and_time_left_in_a_file() -> None:
    text = io.StringIO()
    progress = TerminalProgress(Console(file=text, width=200), rounds=2, trainings=1)
    events = Events(progress)
    with progress:
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
