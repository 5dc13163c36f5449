"""FedICON's numbers (Tan et al., 2023), by table, from `benchmarks/paper/fedicon.csv`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.papers import printed, values

OFFLINE = "fedicon[mode=offline]"
UNSUPERVISED = "fedicon_us[mode=offline]"
#: Of Office-10: more passes over the few test pictures (chosen.toml). For a domain that no client has nobody has a
#: classifier of his own: there the federated one.
LONGER = "fedicon[mode=offline;epochs=10]"
FEDERATED = ("fedicon[mode=offline;base=global]", "fedicon[mode=offline;epochs=10;base=global]")
#: Rows that the paper has, under its names.
PAPERS_NAMES = {one.method: one.row for table in ("1", "9") for one in printed("fedicon") if one.table == table}


@dataclass(frozen=True)
class Paper:
    """One table of the paper: domain → row → accuracy in percent."""

    title: str
    columns: Mapping[str, Mapping[str, float]]

    def value(self, row: str, domain: str) -> float | None:
        """Return the paper's number, None where it has none."""
        return self.columns[domain].get(row)

    def average(self, row: str, domains: Sequence[str]) -> float | None:
        """Return the mean of the paper's numbers over some domains, None where one is missing."""
        found = [value for domain in domains if (value := self.value(row, domain)) is not None]
        return float(np.mean(found)) if len(found) == len(domains) else None


def _paper(title: str, table: str) -> Paper:
    columns = dict.fromkeys(one.column for one in printed("fedicon") if one.table == table)
    return Paper(f"{title} (Table {table})", {name: values("fedicon", table, name) for name in columns})


PAPER = {
    "digit5-covariate": _paper("Digit-5, covariate shift", "1"),
    "digit5-domain": _paper("Digit-5, domain shift", "7"),
    "office10-covariate": _paper("Office-10, covariate shift", "5"),
    "office10-domain": _paper("Office-10, domain shift", "2"),
    "office10-equal-covariate": _paper("Office-10, clients of equal size, covariate shift", "5"),
    "office10-equal-domain": _paper("Office-10, clients of equal size, domain shift", "2"),
    "domainnet-covariate": _paper("DomainNet, covariate shift", "6"),
}
#: Table 9, means over all domains under covariate shift: data set → row → accuracy in percent.
TABLE_9 = {name: values("fedicon", "9", dataset=name) for name in ("digit5", "office10")}


@dataclass(frozen=True)
class Variant:
    """One column of Table 8: which components it has, and our row."""

    extraction: bool
    sharing: bool
    adaptation: bool
    row: str

    @property
    def paper(self) -> float:
        """Return the paper's accuracy in percent."""
        return values("fedicon", "8")[self.row]


ABLATION = (
    Variant(False, False, False, "local"),
    Variant(True, False, False, "fedavg[training=fedicon_local;base=personalised]"),
    Variant(False, True, False, "fedavg"),
    Variant(False, False, True, "fedicon[mode=offline;training=local;base=global]"),
    Variant(True, True, False, "fedavg[training=fedicon;base=personalised]"),
    Variant(False, True, True, "fedicon[mode=offline;training=cross_entropy;base=global]"),
    Variant(True, False, True, "fedicon[mode=offline;training=fedicon_local]"),
    Variant(True, True, True, OFFLINE),
)
