"""The cluster simulation on numbers that can be worked out by hand."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from bench.bench_cluster import DEVELOPERS, WAYS, Job, hours_of_commits, plot, rows, simulate


def test_waiting_is_first_come_first_served():
    # 2 GPUs: the second needs both and waits for the first; the third, small, does not overtake
    assert simulate([Job(0.0, 1, 2.0), Job(0.5, 2, 1.0), Job(1.0, 1, 1.0), Job(9.0, 2, 1.0)], 2) == [0, 1.5, 2.0, 0]


@pytest.mark.slow
def test_equal_seeds_give_equal_rows_and_the_tool_never_costs_more_than_its_plan():
    when = hours_of_commits(None)
    table = rows(32, 14, 1, when)
    assert table == rows(32, 14, 1, when)
    assert len(table) == len(DEVELOPERS) * len(WAYS)
    cost = {(row["developers"], row["way"]): float(row["gpu_hours_a_workday"]) for row in table}
    assert all(cost[n, "tool"] <= cost[n, "plan"] <= cost[n, "all"] for n in DEVELOPERS)
    assert ET.fromstring(plot(table)).tag.endswith("svg")
