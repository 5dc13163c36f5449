"""Paired differences against distributions that can be written down, and the orders that follow from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedtta.benchmarks.papers import AVERAGE, Printed
from fedtta.benchmarks.tables.comparison import Comparison, compare
from fedtta.benchmarks.tables.pairs import (
    Difference,
    baselines,
    choices_table,
    client_values,
    comparable_means,
    compared_columns,
    difference,
    differences_table,
    is_proposed,
    leaders_table,
    orders,
    orders_lines,
    parts_table,
    worst_table,
)
from fedtta.benchmarks.tables.protocol import Cell, Protocol, Table
from fedtta.benchmarks.tables.results import CONSTANT
from fedtta.settings import Settings


def vectors(**seeds: list[float]) -> dict[int, np.ndarray]:
    return {int(name[1:]): np.array(values, float) for name, values in seeds.items()}


def row(**shifts: str) -> dict[str, Any]:
    def mean(text: str) -> float:
        return float(np.mean([float(word) for word in text.split()]))

    return {
        "training": "t",
        "shifts": {
            name: {"accuracy_percent": mean(text), "by_samples_percent": mean(text), "per_client_percent": text}
            for name, text in shifts.items()
        },
    }


def table_of(*cells: Cell, **more: Any) -> Table:
    return Table("t", "Made up", cells, **more)


def test_two_clients_give_three_bootstrap_means() -> None:
    # The mean of two draws from {0, 8} is 0, 4 or 8 with 1/4, 1/2, 1/4: the quantiles at 2.5 and 97.5 % are 0 and 8.
    found = difference(vectors(s1=[10, 20]), vectors(s1=[10, 12]))
    assert found == Difference(4.0, 0.0, 8.0, seeds=1, clients="2")
    assert (found.sign, str(found)) == (0, "+4.00 [+0.00, +8.00]")


def test_the_same_gap_everywhere_has_no_width() -> None:
    base = vectors(s1=[10, 20, 30], s3=[1, 2, 3])
    found = difference({seed: one - 2 for seed, one in base.items()}, base)
    assert found == Difference(-2.0, -2.0, -2.0, seeds=2, clients="3")
    assert found.sign == -1


def test_seeds_that_disagree_widen_the_interval() -> None:
    # Without variation between clients only the choice of seeds varies: means 0, 5 and 10 with 1/4, 1/2, 1/4.
    zero = vectors(s1=[0, 0, 0], s2=[0, 0, 0])
    found = difference(vectors(s1=[0, 0, 0], s2=[10, 10, 10]), zero)
    assert found == Difference(5.0, 0.0, 10.0, seeds=2, clients="3")


def test_seeds_may_have_different_numbers_of_clients() -> None:
    # Seed 1 has two clients with a gap of 0, seed 2 one with 10: every seed counts the same, so the mean is 5. Two
    # drawn seeds have the means 0, 5 and 10 with 1/4, 1/2, 1/4.
    found = difference(vectors(s1=[5, 7], s2=[20]), vectors(s1=[5, 7], s2=[10]))
    assert found == Difference(5.0, 0.0, 10.0, seeds=2, clients="1 to 2")


def test_as_many_clients_are_drawn_as_a_seed_has() -> None:
    # Two draws from {0, 8} of seed 1 have the mean 0, 4 or 8 with 1/4, 1/2, 1/4; those of seed 2 are 0. Of the mean of
    # two drawn seeds, 8 has 1/4 · 1/16 = 1.6 % and 6 has 1/4 · 2 · 1/8 = 6.3 %: the quantile at 97.5 % is 6.
    found = difference(vectors(s1=[0, 8], s2=[0, 0, 0]), vectors(s1=[0, 0], s2=[0, 0, 0]), draws=20_000)
    assert found == Difference(2.0, 0.0, 6.0, seeds=2, clients="2 to 3")


def test_only_shared_seeds_count() -> None:
    found = difference(vectors(s1=[1, 1], s2=[9, 9]), vectors(s1=[0, 0], s3=[5, 5]))
    assert found is not None
    assert (found.mean, found.seeds) == (1.0, 1)
    assert difference(vectors(s1=[1]), vectors(s2=[1])) is None


def test_interval_against_the_normal_approximation() -> None:
    gaps = np.random.default_rng(3).normal(1.0, 2.0, 400)
    found = difference({1: gaps}, {1: np.zeros(400)}, draws=20_000)
    assert found is not None
    half = 1.96 * gaps.std() / np.sqrt(400)
    assert found.low == pytest.approx(gaps.mean() - half, abs=0.02)
    assert found.high == pytest.approx(gaps.mean() + half, abs=0.02)


def test_intervals_cover_the_mean_of_all_clients() -> None:
    draw = np.random.default_rng(5)
    trials = [draw.normal(0.5, 1.0, 40) for _ in range(400)]
    found = [difference({1: gaps}, {1: np.zeros(40)}, draws=400) for gaps in trials]
    covered = sum(one is not None and one.low <= 0.5 <= one.high for one in found)
    assert 355 <= covered <= 397  # 95 % of 400 is 380; percentile intervals of 40 clients are a little short


def test_clients_average_over_the_columns_and_rows_without_clients_are_left_out() -> None:
    old = {"training": "t", "shifts": {"a": {"accuracy_percent": 1.0}, "b": {"accuracy_percent": 1.0}}}
    kept = {"c": {1: {"rows": {"fedavg": row(a="10 20", b="30 60"), "old": old}}}}
    found = client_values(table_of(Cell("c", "C", Settings())), kept)
    assert set(found) == {"fedavg"}
    assert found["fedavg"]["average"][1].tolist() == [20, 40]


def test_where_clients_are_columns_the_average_has_all_of_them() -> None:
    kept = {"c": {1: {"rows": {"fedavg": row(mnist="10", usps="30")}}}}
    cell = Cell("c", "C", Settings(), columns=("mnist", "usps"))
    assert client_values(table_of(cell), kept)["fedavg"]["average"][1].tolist() == [10, 30]


def test_proposed_methods() -> None:
    assert all(map(is_proposed, ("bbn @ pfedbbn[share=all]", "fedthe[history=batch]", "atp (x)", "fedicon_us")))
    assert not any(map(is_proposed, ("fedavg[training=fedicon;base=personalised]", "tent @ pfedbbn", "personal")))


ROWS = {
    "fedavg": row(a="50 50 50", b="50 50 50"),
    "tent": row(a="60 60 60", b="56 56 56"),
    "btfl": row(a="70 71 72", b="70 71 72"),
    "fedthe": row(a="70 72 73", b="70 71 72"),
}


def test_baselines_are_the_named_ones_and_the_best_other() -> None:
    table = table_of(Cell("c", "C", Settings()), against=("fedavg", "fixed_mix"))
    found = compare(table, {"c": {1: {"rows": ROWS}}})
    assert compared_columns(table, found) == ["average"]
    assert baselines(table, found, "average") == ["fedavg", "tent"]


def test_the_best_baseline_is_last_where_the_table_names_it_too() -> None:
    table = table_of(Cell("c", "C", Settings()), against=("tent", "fedavg", "btfl"))
    kept = {"c": {1: {"rows": ROWS}}}
    found = compare(table, kept)
    assert baselines(table, found, "average") == ["fedavg", "btfl", "tent"]
    assert "| row | − `fedavg` | − `btfl` | − `tent` |" in differences_table(table, found, kept)


def test_the_best_baseline_is_chosen_over_equal_seeds() -> None:
    """T3A ran on the easy seed alone: its mean is above Tent's. Without FedAvg, shared seeds count."""
    easy = {**ROWS, "t3a": row(a="59 59 59", b="55 55 55")}
    hard = {"fedavg": row(a="20 20 20", b="20 20 20"), "tent": row(a="30 30 30", b="26 26 26")}
    table = table_of(Cell("c", "C", Settings()))
    found = compare(table, {"c": {1: {"rows": easy}, 2: {"rows": hard}}})
    assert baselines(table, found, "average") == ["fedavg", "tent"]
    for rows in (easy, hard):
        del rows["fedavg"]
    assert comparable_means(compare(table, {"c": {1: {"rows": easy}, 2: {"rows": hard}}}), "average") == pytest.approx(
        {"tent": 58.0, "t3a": 57.0, "btfl": 71.0, "fedthe": 71.33}, abs=0.01
    )


def test_pages_state_differences_and_orders() -> None:
    table = table_of(Cell("c", "C", Settings()))
    kept = {"c": {1: {"rows": ROWS}}}

    def of(mean: float) -> Printed:
        return Printed("1", {}, "A", "a", "average", "%", mean, None)

    paper = {"btfl": {"average": of(80)}, "fedthe": {"average": of(79)}, "fedavg": {"average": of(81)}}
    found = compare(table, kept)
    found = Comparison(found.title, found.values, found.seeds, {**paper, "old": {"average": of(1)}})
    assert differences_table(table, found, kept).splitlines()[2:] == [
        "| row | − `fedavg` | − `tent` |",
        "| --- | --: | --: |",
        "| `fedavg` |  | -8.00 [-8.00, -8.00] |",
        "| `tent` | +8.00 [+8.00, +8.00] |  |",
        "| `btfl` | +21.00 [+20.00, +22.00] | +13.00 [+12.00, +14.00] |",
        "| `fedthe` | +21.33 [+20.00, +22.50] | +13.33 [+12.00, +14.50] |",
    ]
    told = [(one.better, one.worse, one.holds) for one in orders(found, client_values(table, kept), ["average"])]
    assert told == [("fedavg", "btfl", -1), ("fedavg", "fedthe", -1), ("btfl", "fedthe", 0)]


def test_orders_are_of_one_experiment_of_the_paper() -> None:
    table, kept = table_of(Cell("c", "C", Settings())), {"c": {1: {"rows": ROWS}}}
    found = compare(table, kept)
    settings = {"btfl": {"model": "a"}, "fedthe": {"model": "b"}, "fedavg": {"model": "a", "collaborations": "none"}}
    paper = {
        name: {"average": Printed("1", {"collaborations": "pfedbbn"} | setting, "A", name, "average", "%", mean, None)}
        for mean, (name, setting) in enumerate(settings.items())
    }
    found = Comparison(found.title, found.values, found.seeds, paper)
    told = [(one.better, one.worse) for one in orders(found, client_values(table, kept), ["average"])]
    assert told == [("fedavg", "btfl")]


def test_differences_beside_means_over_samples_are_said_to_be_over_clients() -> None:
    kept = {"c": {1: {"rows": ROWS}}}
    tables = [table_of(Cell("c", "C", Settings(), weighting=weighting)) for weighting in ("clients", "samples")]
    told = ["over clients and not over samples" in differences_table(one, compare(one, kept), kept) for one in tables]
    assert told == [False, True]


def test_a_line_names_the_orders() -> None:
    table, kept = table_of(Cell("c", "C", Settings())), {"c": {1: {"rows": ROWS}}}
    found = compare(table, kept)
    paper = {
        name: {"average": Printed("1", {}, "A", name, "average", "%", mean, None)}
        for name, mean in (("btfl", 80.0), ("fedavg", 70.0), ("fedthe", 60.0))
    }
    found = Comparison(found.title, found.values, found.seeds, paper)
    assert orders_lines(table, found, kept) == [
        "The paper's orders, average: hold: `btfl` > `fedavg`; are reversed: `fedavg` > `fedthe`; "
        "cannot be told: `btfl` > `fedthe`."
    ]


def test_rows_without_clients_have_no_intervals() -> None:
    old = {"training": "t", "shifts": {"a": {"accuracy_percent": 1.0}}}
    table, kept = table_of(Cell("c", "C", Settings())), {"c": {1: {"rows": {"fedavg": old}}}}
    assert "not kept" in differences_table(table, compare(table, kept), kept)
    assert orders_lines(table, compare(table, kept), kept) == []


def test_leaders_of_each_shift() -> None:
    protocol = Protocol("p", "", {}, (), (table_of(Cell("c", "C", Settings())),))
    kept = {"c": {1: {"rows": {**ROWS, CONSTANT: row(a="99 99 99", b="99 99 99")}}}}
    assert leaders_table(protocol, kept, most=2).splitlines() == [
        "| table | shift | `fedavg`, % | best | second | seeds |",
        "| --- | --- | --: | --- | --- | --: |",
        "| Made up | a | 50.0 | `fedthe` +21.67 [+20.00, +23.00] | `btfl` +21.00 [+20.00, +22.00] | 1 |",
        "| Made up | b | 50.0 | `btfl` +21.00 [+20.00, +22.00] | `fedthe` +21.00 [+20.00, +22.00] | 1 |",
        "| Made up | average | 50.0 | `fedthe` +21.33 [+20.00, +22.50] | `btfl` +21.00 [+20.00, +22.00] | 1 |",
    ]
    assert leaders_table(protocol, {}) == ""
    kept["c"][2] = {"rows": {label: one for label, one in ROWS.items() if label != "fedthe"}}
    assert "fedthe" not in leaders_table(protocol, kept)  # it lacks a seed


def test_a_row_on_fewer_samples_is_shown_and_not_compared() -> None:
    table = table_of(Cell("c", "C", Settings()), against=("fedavg",))
    rows = {"fedavg": row(a="50 60"), "memo": row(a="90 90"), "tent": row(a="60 60")}
    for label, samples in (("fedavg", 600), ("memo", 100), ("tent", 600)):
        rows[label]["shifts"]["a"]["samples"] = samples
    kept = {"c": {1: {"rows": rows}}}
    found = compare(table, kept)
    assert found.values["memo"] == {"a": {1: 90.0}, AVERAGE: {1: 90.0}}
    assert baselines(table, found, "a") == ["fedavg", "tent"]
    assert "memo" not in differences_table(table, found, kept)
    assert "memo" not in leaders_table(Protocol("p", "", {}, (), (table,)), kept)


def test_leaders_are_ranked_over_the_seeds_of_their_gains() -> None:
    """The first seed, without clients' accuracies, would turn the order round."""
    old = {"fedavg": row(a="50 60"), "tent": row(a="90 90"), "btfl": row(a="55 65")}
    for one in old.values():
        del one["shifts"]["a"]["per_client_percent"]
    new = {"fedavg": row(a="50 60"), "tent": row(a="60 60"), "btfl": row(a="70 70")}
    kept = {"c": {1: {"rows": old}, 2: {"rows": new}}}
    protocol = Protocol("p", "", {}, (), (table_of(Cell("c", "C", Settings())),))
    assert leaders_table(protocol, kept, most=2).splitlines()[2:] == [
        "| Made up | a | 55.0 | `btfl` +15.00 [+10.00, +20.00] | `tent` +5.00 [+0.00, +10.00] | 1 |",
    ]


def test_what_each_part_brings_is_paired_within_a_cell() -> None:
    protocol = Protocol("p", "", {}, (Cell("c", "C", Settings(), column="x"), Cell("d", "D", Settings())), ())
    first = {"bbn": row(a="50 60"), "bbn @ fedavg": row(a="60 70"), "bbn @ pfedbbn[share=all]": row(a="61 73")}
    second = {"bbn": row(a="50 60"), "bbn @ fedavg": row(a="60 70")}
    kept = {"c": {1: {"rows": first}, 2: {"rows": second}}, "d": {1: {"rows": {"bbn": row(a="50 60")}}}}
    assert parts_table(protocol, kept).splitlines()[2:] == [
        "| `c` | +10.00 [+10.00, +10.00] | +2.00 [+1.00, +3.00] |  | 2, 1 |",
    ]
    assert parts_table(protocol, {}) == ""


def test_auto_beside_the_best_fixed_row_of_each_shift() -> None:
    protocol = Protocol("p", "", {}, (), (table_of(Cell("c", "C", Settings())),))
    rows = {"fedavg": row(a="50 60", b="50 60"), "btfl": row(a="70 70", b="40 40")}
    chosen = {"auto": row(a="71 61", b="49 58")}
    kept = {"c": {1: {"rows": {**rows, **chosen}}, 2: {"rows": {**rows, "auto": row(a="70 70", b="50 60")}}}}
    assert choices_table(protocol, kept).splitlines()[2:] == [
        "| Made up | a | 55.0 | 70.0 (`btfl`) | 68.0 | 2.0 | 1.0 | 0 of 4 | 2 |",
        "| Made up | b | 55.0 | 55.0 (`fedavg`) | 54.2 | 0.8 | -2.0 | 1 of 4 | 2 |",
    ]
    assert choices_table(protocol, {"c": {1: {"rows": rows}}}) == ""
    assert worst_table(protocol, kept).splitlines()[2:] == [
        "| Made up | `auto` | 61.1 | 59.5 | 54.2 (b) | 2 |",
        "| Made up | `fedavg` | 55.0 | 50.0 | 55.0 (a) | 2 |",
        "| Made up | `btfl` | 55.0 | 55.0 | 40.0 (b) | 2 |",
    ]
    assert worst_table(protocol, {"c": {1: {"rows": rows}}}) == ""


OLD = {"training": "t", "shifts": {"a": {"accuracy_percent": 1.0}}}  # without clients' accuracies


@pytest.mark.parametrize(
    "seeds",
    [
        {1: {"fedavg": row(a="50 60"), "auto": OLD}},
        {1: {"fedavg": OLD, "auto": row(a="50 60")}},
        {1: {"fedavg": row(a="50 60"), "auto": row(a="50 60")}, 2: {"fedavg": row(a="50 60"), "auto": OLD}},
    ],
)
def test_without_clients_accuracies_there_is_nothing_to_choose_by(seeds: dict[int, Any]) -> None:
    protocol = Protocol("p", "", {}, (), (table_of(Cell("c", "C", Settings())),))
    assert choices_table(protocol, {"c": {seed: {"rows": rows} for seed, rows in seeds.items()}}) == ""


def test_choices_are_means_over_the_seeds_with_clients_accuracies() -> None:
    protocol = Protocol("p", "", {}, (), (table_of(Cell("c", "C", Settings())),))
    rows = {"fedavg": row(a="50 60"), "auto": row(a="52 61")}
    kept = {"c": {1: {"rows": rows}, 2: {"rows": {"fedavg": OLD, "auto": row(a="1 2")}}}}
    assert choices_table(protocol, kept).splitlines()[2:] == [
        "| Made up | a | 55.0 | 55.0 (`fedavg`) | 56.5 | -1.5 | 1.0 | 0 of 2 | 1 |",
    ]


def test_the_worst_of_clients_that_each_count_for_one_column() -> None:
    cell = Cell("c", "C", Settings(), columns=("x", "x", "y"))
    rows = {"fedavg": row(x="50 60", y="40"), "auto": row(x="71 61", y="49")}
    assert worst_table(Protocol("p", "", {}, (), (table_of(cell),)), {"c": {1: {"rows": rows}}}).splitlines()[2:] == [
        "| Made up | `auto` | 57.5 | 49.0 | 49.0 (y) | 1 |",  # (66 + 49) / 2
        "| Made up | `fedavg` | 47.5 | 40.0 | 40.0 (y) | 1 |",
    ]


def test_columns_of_other_clients_have_no_worst_client() -> None:
    cells = Cell("c", "C", Settings(), column="x"), Cell("d", "D", Settings(), column="y")
    few, more = ({"fedavg": row(a=none), "auto": row(a=auto)} for none, auto in (("50 60", "60 60"), ("40", "50")))
    kept = {"c": {1: {"rows": few}}, "d": {1: {"rows": more}}}
    assert worst_table(Protocol("p", "", {}, (), (table_of(*cells),)), kept).splitlines()[2:] == [
        "| Made up | `auto` | 55.0 | – | 50.0 (y) | 1 |",
        "| Made up | `fedavg` | 47.5 | – | 40.0 (y) | 1 |",
    ]


def test_parts_on_fewer_samples_are_not_compared() -> None:
    rows = {"bbn": row(a="50 60 70"), "bbn @ fedavg": row(a="60 70"), "bbn @ pfedbbn[share=all]": row(a="61 73")}
    for label, samples in zip(rows, (300, 200, 200), strict=True):
        rows[label]["shifts"]["a"]["samples"] = samples
    protocol = Protocol("p", "", {}, (Cell("c", "C", Settings()),), ())
    assert parts_table(protocol, {"c": {1: {"rows": rows}}}) == ""
    rows["bbn"] = row(a="50 60")
    assert parts_table(protocol, {"c": {1: {"rows": rows}}}).splitlines()[2:] == [
        "| `c` | +10.00 [+10.00, +10.00] | +2.00 [+1.00, +3.00] |  | 1 |",
    ]


def test_auto_is_no_baseline() -> None:
    table = table_of(Cell("c", "C", Settings()))
    kept = {"c": {1: {"rows": {"fedavg": row(a="50 60"), "auto": row(a="70 70"), "tent": row(a="60 60")}}}}
    assert baselines(table, compare(table, kept), "a") == ["fedavg", "tent"]
