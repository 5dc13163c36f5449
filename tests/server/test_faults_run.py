"""Whole runs, server and real devices, through faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtta.models import load_arrays
from fedtta.server.app import serve
from fedtta.server.methods import plan
from fedtta.settings import Settings, SettingsError
from tests.server.test_adaptation import SMALL as COLLABORATIVE
from tests.server.test_rates import ATP
from tests.server.test_resume import BATCHNORM
from tests.server.test_run import SMALL, assert_same_results, events
from tests.transports import Client, FakeTransport, devices


class Restarting(FakeTransport):
    """Node 899 becomes another one after some requests, as one that was restarted without a key."""

    def __init__(self, clients: dict[int, Client], after: int, new: int = 5) -> None:
        super().__init__(clients)
        self.after, self.new = after, new

    def nodes(self) -> list[int]:
        if len(self.sent) >= self.after and 899 in self.clients:
            self.clients[self.new] = self.clients.pop(899)
        return super().nodes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        SMALL.replace(methods="fedavg,btfl", fraction=0.06, shifts="original", min_replies=3),
        SMALL.replace(methods="fedbn", fraction=0.06, shifts="original", min_replies=3, **BATCHNORM),
        COLLABORATIVE.replace(collaborations="fedavgm", min_replies=3),
        ATP.replace(clients=3, fraction=0.06, rates_clients=0, min_replies=3),
    ],
    ids=["fedavg", "fedbn", "collaboration", "rates"],
)
def test_a_restart_without_a_key_changes_no_bit(settings: Settings, tmp_path: Path) -> None:
    settings = settings.replace(state_dir=str(tmp_path / "state"))
    serve(devices(settings), settings, tmp_path / "calm")
    for after in (3, 6, 9):  # messages
        folder = tmp_path / f"after {after}"
        serve(Restarting(devices(settings).clients, after), settings, folder)
        assert_same_results(tmp_path / "calm", folder)
        (back,) = [e for e in events(folder) if e["event"] == "rejoined"]
        assert (back["partition"], back["old_node_id"], back["node_id"]) == (1, 899, 5)
        assert not [e for e in events(folder) if e["event"] in ("late", "failed", "refused")]


@pytest.mark.slow
def test_statistics_and_rates_of_a_whole_run_are_robust_too(tmp_path: Path) -> None:
    settings = SMALL.replace(
        clients=6, fraction=0.12, shifts="original", aggregation="multikrum", update_norm_bound=100.0
    )
    serve(devices(settings), settings, tmp_path / "r")
    arrays, _ = load_arrays(tmp_path / "r" / "statistics.safetensors")
    assert 0 <= arrays["dle"].min() <= arrays["dle"].max() <= 1
    for methods in ("fedprox", "fedbn", "qffl"):
        with pytest.raises(SettingsError, match="aggregation = 'multikrum'"):
            plan(settings.replace(methods=methods, model="resnet20-bn"))
    atp = ATP.replace(clients=6, fraction=0.12, aggregation="fedmedian", rates_clients=0)
    atp = atp.replace(state_dir=str(tmp_path))
    serve(devices(atp), atp, tmp_path / "a")
