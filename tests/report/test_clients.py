"""What the report says of each client: names, data, who came and went, who has no labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedtta.server.report import matrix, plots, render_tables
from fedtta.server.report.markup import CSS
from fedtta.server.report.tables import collaboration_csv
from tests.report.runs import Elements, adapt_round, adapted, evaluation, page_of, results_of
from tests.report.test_page import rows_of


def data(**changes: Any) -> dict[str, Any]:
    known = {"own_data": True, "labelled": True, "samples": 12, "skipped": 0, "classes_present": 2, "notes": []}
    return {**known, **changes}


#: Three devices at the start, of which one has no labels, and one that joined in round 2 and comes first by name.
CLIENTS: dict[str, Any] = {
    "event": "clients", "class_counts": None, "classes": ["cat", "dog"], "names": ["site-b", "site-c", "site-d"],
    "sizes": [[6, 2, 2], [0, 0, 9], [5, 3, 2]], "roles": ["both", "target", "both"],
    "data": [
        data(skipped=2, notes=["2 files skipped: corrupt <JPEG>"]),
        data(labelled=False, samples=9, classes_present=None),
        data(samples=10, classes_present=None),
    ],
}  # fmt: skip
JOINED: dict[str, Any] = {
    "event": "joined", "partition": 3, "name": "site-a", "node_id": 77, "training": "ce", "round": 2,
    "sizes": [700, 200, 100], "role": "both", "data": data(samples=1000),
}  # fmt: skip
CAME_AND_WENT: list[dict[str, Any]] = [
    {"event": "left_alone", "node_id": 5, "name": "cows", "reason": "cows: classes = ['cow']"},
    JOINED,
    {"event": "left", "partition": 0, "name": "site-b", "node_id": 70, "training": "ce", "round": 3},
    {"event": "rejoined", "partition": 0, "name": "site-b", "node_id": 71, "training": "ce", "round": 4},
]  # fmt: skip
EVALUATED = [evaluation("tent", "original", client, right, 4) for client, right in ((0, 1), (2, 2), (3, 3))]
ADAPTED = [
    adapt_round(1, [[0.25] * 4] * 4),
    *(adapted(1, client, [right, 0], [4, 0]) for client, right in ((0, 1), (2, 2), (3, 3))),
    adapted(1, 1, [0, 0], [0, 0]),
]


def table(page: str, caption: str) -> list[list[str]]:
    return rows_of(page.split(caption)[1])


def test_each_client_has_a_row_with_what_is_known(tmp_path: Path) -> None:
    page = page_of(tmp_path, [CLIENTS, *CAME_AND_WENT])
    assert table(page, "<strong>Data of each client.") == [
        ["site-a", "its own", "both", "1,000", "700", "200", "100", "0", "2"],
        ["site-b", "its own", "both", "12", "6", "2", "2", "2", "2"],
        ["site-c", "its own, no labels", "target", "9", "0", "0", "9", "0", "no labels"],
        ["site-d", "its own", "both", "10", "5", "3", "2", "0", "unknown"],
    ]
    words = Elements(page).text
    assert "site-b: 2 files skipped: corrupt <JPEG>" in words
    assert "4 clients with 9 to 1,000 samples" in words
    assert "Class counts stay on the devices" in words


def test_a_client_that_comes_back_with_other_data_has_these(tmp_path: Path) -> None:
    """A device's own data may have grown; what it is tested on then is not what it had at the start."""
    back = {"event": "rejoined", "partition": 0, "name": "site-b", "node_id": 71, "training": "ce", "round": 4}
    grown = {**back, "sizes": [60, 20, 20], "data": data(samples=120)}
    of_earlier_version = {**back, "partition": 2, "name": "site-d", "sizes": [6, 3, 2]}
    assert table(page_of(tmp_path, [CLIENTS, back, grown, of_earlier_version]), "<strong>Data of each client.") == [
        ["site-b", "its own", "both", "120", "60", "20", "20", "0", "2"],
        ["site-c", "its own, no labels", "target", "9", "0", "0", "9", "0", "no labels"],
        ["site-d", "its own", "both", "10", "6", "3", "2", "0", "unknown"],
    ]


def test_who_came_and_went(tmp_path: Path) -> None:
    assert table(page_of(tmp_path, [CLIENTS, *CAME_AND_WENT]), "<strong>Clients that came and went") == [
        ["left alone", "cows", "at the start", "5", "cows: classes = [&#x27;cow&#x27;]"],
        ["joined", "site-a", "ce, round 2", "77", "–"],
        ["left", "site-b", "ce, round 3", "70", "–"],
        ["came back", "site-b", "ce, round 4", "71", "–"],
    ]


def test_a_divided_data_set_and_a_run_of_an_earlier_version(tmp_path: Path) -> None:
    start = {
        "event": "clients",
        "class_counts": [[3, 0], [2, 2]],
        "classes": ["a", "b"],
        "sizes": [[3, 1, 1], [4, 1, 1]],
    }
    page = page_of(tmp_path, [start])
    assert table(page, "<strong>Data of each client.") == [
        ["0", "part of the data set", "–", "5", "3", "1", "1", "0", "1"],
        ["1", "part of the data set", "–", "6", "4", "1", "1", "0", "2"],
    ]
    many = {**start, "class_counts": None, "sizes": [[3, 1, 1]] * 60}
    page = page_of(tmp_path, [many])
    assert "<summary>Data of each client</summary>" in page
    rows = table(page, "<strong>Data of each client.")
    assert (len(rows), rows[0][-1]) == (50, "unknown")


def test_on_a_narrow_screen_each_cell_has_its_label(tmp_path: Path) -> None:
    """A row becomes a list as wide as the screen, so nothing is cut off."""
    page = page_of(tmp_path, [CLIENTS])
    body = page.split('<table class="cards">')[1].split("</table>")[0]
    assert body.count('data-label="samples"') == body.count("<tr>") - 1 == 3
    narrow = CSS.split("@media (max-width: 34rem)")[1].split("@media print")[0]
    assert ".cards tr { display: block" in narrow
    assert "content: attr(data-label)" in narrow


def test_tables_and_plots_leave_out_who_has_no_labels_and_are_in_name_order(tmp_path: Path) -> None:
    page = page_of(tmp_path, [CLIENTS, *CAME_AND_WENT, *EVALUATED])
    assert "site-c: no labels, so no accuracies." in page
    assert table(page, "<strong>Accuracy of each client</strong> in %.") == [
        ["tent · original", "75.0", "25.0", "50.0"]
    ]
    head = page.split("<strong>Accuracy of each client</strong> in %.")[1].split("</thead>")[0]
    assert [name in head for name in ("site-a", "site-b", "site-c", "site-d")] == [True, True, False, True]
    plot = plots.accuracy_by_client(results_of(tmp_path, [CLIENTS, *CAME_AND_WENT, *EVALUATED]))
    assert plot is not None
    assert "site-a" in plot.svg
    assert "site-c" not in plot.svg


def test_the_same_in_test_time_rounds(tmp_path: Path) -> None:
    results = results_of(tmp_path, [CLIENTS, JOINED, *ADAPTED])
    found = matrix(results)
    assert found is not None
    head, line = (line.split(",") for line in collaboration_csv(found).splitlines())
    assert head[-3:] == ["client:site-a", "client:site-b", "client:site-d"]
    assert line[-3:] == ["75.00", "25.00", "50.00"]
    (*_, clients) = render_tables(results)
    assert [str(column.header) for column in clients.columns][2:] == ["site-a", "site-b", "site-d"]


@pytest.mark.parametrize("partition", [0, 3])
def test_incidents_and_agents_name_their_client(partition: int, tmp_path: Path) -> None:
    incident = {"event": "failed", "training": "ce", "round": 3, "reason": "disk full", "partition": partition}
    served = {"event": "served", "training": "ce", "partition": partition, "served": "refused: one <class> only"}
    page, name = page_of(tmp_path, [CLIENTS, JOINED, incident, served]), ("site-b", "", "", "site-a")[partition]
    assert table(page, "<strong>Replies that did not count")[0][:4] == ["failed", "ce", "3", name]
    assert table(page, "<strong>Model of each agent") == [[name, "ce", "refused: one &lt;class&gt; only"]]
