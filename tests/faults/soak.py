"""Random parts of a deployment killed at random moments: `python -m tests.faults.soak --kills 200 --seed 1`.

In each run `--each` parts are killed one after the other, and started again as a service manager does; each run is
supervised. It has to end with the bits of the run that nothing has happened to, by itself or after one `resume`. It
prints a line of JSON for each run; the exit status is 1 when one ended otherwise. A run with a kill takes some two
minutes, since Flower takes a silent process for alive for one.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fedtta.messages.flower import allow_messages
from fedtta.server.checkpoints import FOLDER
from fedtta.settings import Settings
from fedtta.simulation.superlink import FlowerError
from tests.faults.stage import PATIENCE, Stage, kill, stage
from tests.server.test_run import assert_same_results, run

CLIENTS = 2
RESUMES = 3
RESTART = 5.0  # seconds between two looks of the service manager
#: Part → a word of its command line, and the folder whose processes count (empty: those of the SuperLink).
PARTS: dict[str, tuple[str, str]] = {
    "superlink": ("flower-superlink", ""),
    "serverapp": ("flwr-serverapp", ""),
    **{f"supernode {i}": ("flower-supernode", f"node-{i}") for i in range(CLIENTS)},
    **{f"clientapp {i}": ("flwr-clientapp", f"node-{i}") for i in range(CLIENTS)},
    **{f"agent {i}": ("fedtta.client.agent", f"agent-{i}") for i in range(CLIENTS)},
}
#: Momentum: the server has a state of its own. All clients are needed in every round, so the bits are known.
SETTINGS = Settings(
    clients=CLIENTS, fraction=0.3, image_size=20, device="cpu", rounds=3, local_epochs=6, personal_epochs=1,
    augment=False, methods="fedavgm,fedthe", shifts="original", node_timeout=300.0, round_timeout=300.0,
    min_replies=CLIENTS,
)  # fmt: skip


def processes(made: Stage, part: str) -> list[int]:
    """Return the ids of a part's processes."""
    word, folder = PARTS[part]
    return made.processes(word, folder)


def killed(made: Stage, part: str, moment: float, running: Future[None]) -> bool:
    """Kill a part after so many seconds, or as soon as it runs; return False if the run ended before."""
    end = time.monotonic() + moment
    while not running.done():
        if time.monotonic() >= end and (found := processes(made, part)):
            kill(*found)
            return True
        time.sleep(0.02)
    return False


def ended(made: Stage, name: str, running: Future[None]) -> str:
    """Return how a run has ended: "completed", "resumed by itself", "again" or "failed"; wait for it."""
    try:
        running.result(PATIENCE)
    except (FlowerError, TimeoutError) as error:
        print(f"{name}: {error}"[:2000], file=sys.stderr)
        return "failed"
    if (made.root / "results" / f"{name}-again").exists():
        return "again"
    return "resumed by itself" if any(one["event"] == "resumed" for one in made.events(name)) else "completed"


def compared(made: Stage, name: str, reference: Path) -> str:
    """Return "same bits" or what differs: clients that were named as lost, or something that must not be."""
    try:
        assert_same_results(made.results(name), reference)
    except (AssertionError, OSError) as error:
        lost = {one["partition"] for one in made.events(name) if one["event"] in ("failed", "late", "refused")}
        return f"without clients {sorted(lost)}" if lost else f"other bits: {error}"[:500]
    return "same bits"


def one_run(made: Stage, name: str, plan: Sequence[tuple[str, float]], reference: Path) -> dict[str, Any]:
    """Kill parts in a run, each so many seconds after the one before; return the kills and what became of the run."""
    begun = time.monotonic()
    running = made.run(SETTINGS, resumes=RESUMES + len(plan), run_name=name)
    kills = []
    for part, moment in plan:
        if not killed(made, part, moment, running):
            break
        kills.append(f"{part} at {time.monotonic() - begun:.1f} s")
    how = ended(made, name, running)
    if how == "failed" and list((made.results(name) / FOLDER).glob("*")):  # resumable, by the operator
        how = f"resumed by hand: {ended(made, name, made.run(SETTINGS, resume=str(made.results(name))))}"
    elif how == "failed":  # before its first checkpoint: there is nothing to lose
        made.run(SETTINGS, run_name=f"{name}-again").result(PATIENCE)
        how = "begun again by hand"
    bits = compared(made, f"{name}-again" if "again" in how else name, reference)
    return {"kills": kills, "run": how, "result": bits, "seconds": round(time.monotonic() - begun)}


def soak(folder: Path, kills: int, each: int, seed: int, parts: Sequence[str]) -> list[dict[str, Any]]:
    """Deploy, kill so often, and return what became of each run."""
    allow_messages()
    reference = run(folder / "undisturbed", SETTINGS)
    order, found, done = random.Random(seed), [], 0
    managed = [f"{kind}-{i}" for kind in ("node", "agent") for i in range(CLIENTS)]
    with stage(folder, CLIENTS) as made, made.managed("superlink", *managed, delay=RESTART):
        begun = time.monotonic()
        made.run(SETTINGS, run_name="measured").result(PATIENCE)
        length = time.monotonic() - begun
        assert_same_results(made.results("measured"), reference)
        while done < kills:
            plan = [(order.choice(parts), order.uniform(0.0, length)) for _ in range(min(each, kills - done))]
            name = f"run-{len(found) + 1}"
            found.append(one_run(made, name, plan, reference))
            done += len(found[-1]["kills"])
            if found[-1]["result"] == "same bits":
                for left in (name, f"{name}-again"):
                    shutil.rmtree(made.results(left), ignore_errors=True)
            print(json.dumps({"number": len(found), "done": done, **found[-1]}), flush=True)
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Return exit status 0 when each run ended with the bits of the undisturbed one."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__, allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--each", type=int, default=1, help="kills in each run, if it lasts long enough")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", default=",".join(PARTS), help="of %(default)s")
    parser.add_argument("--folder", type=Path, help="kept: logs, and the results of runs that ended otherwise")
    arguments = parser.parse_args(words)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="fedtta-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    found = soak(folder.resolve(), arguments.kills, arguments.each, arguments.seed, arguments.parts.split(","))
    counts = Counter((one["run"], one["result"]) for one in found)
    for (how, result), count in sorted(counts.items()):
        print(f"{count:4} x {how}, {result}")
    killed_parts = Counter(text.split()[0] for one in found for text in one["kills"])
    print(", ".join(f"{part} {count}" for part, count in sorted(killed_parts.items())))
    bad = [one for one in found if one["result"] != "same bits"]
    print(f"{killed_parts.total()} kills in {len(found)} runs, {len(bad)} with another end; {folder}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
