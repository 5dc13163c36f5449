"""FedICON's numbers (Tan et al., 2023), by table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

OFFLINE = "fedicon[mode=offline]"
UNSUPERVISED = "fedicon_us[mode=offline]"
#: Rows that the paper has, under its names.
PAPERS_NAMES = {
    "local": "Local",
    "fedavg": "FedAvg",
    "fedavg_ft": "FedAvg-FT",
    "fedprox": "FedProx",
    "fedrep": "FedRep",
    "fedbn": "FedBN",
    "fedthe": "FedTHE",
    "tent": "Tent",
    "eata": "EATA",
    "t3a[prototype=direction]": "T3A",
    OFFLINE: "FedICON",
    UNSUPERVISED: "FedICON-us",
}


@dataclass(frozen=True)
class Paper:
    """One table of the paper: domain → accuracies in percent, in the order of `PAPERS_NAMES` without FedICON-us."""

    title: str
    columns: Mapping[str, tuple[float, ...]]

    def value(self, row: str, domain: str) -> float | None:
        """Return the paper's number, None where it has none."""
        return dict(zip(PAPERS_NAMES, self.columns[domain], strict=False)).get(row)

    def average(self, row: str, domains: Sequence[str]) -> float | None:
        """Return the mean of the paper's numbers over some domains, None where one is missing."""
        values = [value for domain in domains if (value := self.value(row, domain)) is not None]
        return float(np.mean(values)) if len(values) == len(domains) else None


PAPER = {
    "digit5-covariate": Paper("Digit-5, covariate shift (Table 1)", {
        "mnist": (60.65, 86.18, 85.92, 86.45, 66.78, 61.42, 84.52, 86.13, 85.37, 72.58, 89.67),
        "svhn": (34.43, 38.60, 40.25, 38.95, 44.17, 41.38, 39.00, 43.87, 43.65, 44.23, 45.23),
        "usps": (16.91, 58.19, 54.28, 57.80, 15.81, 41.73, 58.03, 67.51, 67.12, 49.44, 72.13),
        "synthdigits": (39.93, 51.50, 51.23, 52.40, 44.60, 42.77, 51.92, 50.47, 50.70, 45.62, 56.13),
        "mnistm": (18.07, 40.72, 41.08, 40.55, 19.33, 42.35, 40.55, 47.73, 47.58, 46.13, 47.98),
    }),
    "digit5-domain": Paper("Digit-5, domain shift (Table 7)", {
        "mnist": (41.35, 81.30, 79.63, 83.28, 57.39, 78.65, 79.09, 74.65, 74.91, 79.30, 89.75),
        "svhn": (14.98, 21.04, 20.86, 23.26, 17.72, 20.74, 20.78, 32.89, 33.02, 19.93, 30.22),
        "usps": (32.67, 54.32, 53.79, 53.87, 42.72, 63.41, 55.62, 65.61, 65.99, 53.86, 74.14),
        "synthdigits": (18.68, 42.04, 40.98, 41.75, 24.08, 37.04, 41.98, 45.62, 45.71, 41.10, 51.73),
        "mnistm": (18.22, 31.92, 31.44, 31.96, 20.88, 23.20, 30.74, 28.36, 28.29, 31.22, 36.03),
    }),
    "office10-covariate": Paper("Office-10, covariate shift (Table 5)", {
        "amazon": (60.94, 61.63, 64.93, 61.81, 55.90, 49.83, 62.85, 58.51, 58.16, 58.68, 71.53),
        "caltech10": (39.70, 35.41, 41.04, 36.15, 32.15, 38.37, 37.33, 44.44, 44.30, 42.67, 48.44),
        "dslr": (66.67, 67.71, 67.79, 64.58, 44.79, 64.58, 63.54, 61.46, 61.46, 63.54, 69.79),
        "webcam": (64.97, 65.45, 68.04, 67.23, 54.07, 56.50, 69.49, 67.23, 65.54, 66.10, 70.06),
    }),
    "office10-domain": Paper("Office-10, domain shift (Table 2)", {
        "amazon": (24.07, 44.91, 41.78, 42.53, 20.02, 42.53, 41.61, 38.25, 38.25, 39.76, 50.46),
        "caltech10": (18.62, 26.27, 24.94, 24.44, 17.68, 28.64, 24.79, 25.93, 25.73, 22.77, 33.28),
        "dslr": (36.46, 61.46, 55.56, 56.60, 34.03, 51.04, 56.94, 54.17, 54.86, 53.82, 67.01),
        "webcam": (28.81, 48.21, 46.52, 42.94, 24.86, 43.69, 44.63, 42.00, 42.75, 45.76, 48.21),
    }),
    "domainnet-covariate": Paper("DomainNet, covariate shift (Table 6)", {
        "clipart": (72.05, 78.94, 77.23, 79.13, 73.67, 78.32, 66.63, 49.24, 49.43, 78.71, 79.66),
        "infograph": (36.53, 37.32, 37.91, 37.95, 36.30, 37.15, 35.01, 27.47, 27.09, 36.77, 38.43),
        "painting": (74.31, 70.60, 75.27, 69.47, 74.47, 74.82, 60.58, 43.62, 42.89, 74.76, 76.01),
        "quickdraw": (50.20, 50.05, 46.80, 49.95, 53.70, 44.75, 43.70, 30.30, 29.35, 53.10, 57.40),
        "real": (79.25, 77.90, 80.44, 77.77, 79.05, 80.32, 56.74, 31.18, 30.90, 80.32, 84.72),
        "sketch": (67.78, 70.13, 70.76, 69.86, 67.78, 70.04, 62.18, 46.21, 46.21, 72.65, 76.44),
    }),
}  # fmt: skip
#: Table 9: row → (Digit-5, Office-10), means over all domains under covariate shift.
TABLE_9 = {
    "local": (34.00, 58.07),
    "fedavg": (55.04, 57.55),
    "fedavg_ft": (54.55, 60.45),
    OFFLINE: (62.23, 64.96),
    UNSUPERVISED: (61.60, 63.79),
}


@dataclass(frozen=True)
class Variant:
    """One column of Table 8: which components it has, the paper's accuracy, and our row (empty: there is none)."""

    extraction: bool
    sharing: bool
    adaptation: bool
    paper: float
    row: str


ABLATION = (
    Variant(False, False, False, 34.00, "local"),
    Variant(True, False, False, 48.60, "fedavg[training=fedicon_local;base=personalised]"),
    Variant(False, True, False, 55.04, "fedavg"),
    Variant(False, False, True, 39.92, "fedicon[mode=offline;training=local;base=global]"),
    Variant(True, True, False, 59.39, "fedavg[training=fedicon;base=personalised]"),
    Variant(False, True, True, 59.54, "fedicon[mode=offline;training=cross_entropy;base=global]"),
    Variant(True, False, True, 49.67, "fedicon[mode=offline;training=fedicon_local]"),
    Variant(True, True, True, 62.23, OFFLINE),
)
