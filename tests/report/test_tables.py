"""The data of a page: means, what has no mean, and packing without loss."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthscope.report.tables import chosen, numbers_of, packed
from profiles_made_up import made_up


def unpacked(table: dict) -> pd.DataFrame:
    """What the page's own program does, in Python."""
    columns = {}
    for column in table["columns"]:
        if "values" in column:
            columns[column["name"]] = column["values"]
            continue
        values, value = [], 0
        for step, count in zip(column["steps"][::2], column["steps"][1::2], strict=True):
            for _ in range(count):
                value += step
                values.append(value)
        columns[column["name"]] = [column["texts"][code] for code in values] if "texts" in column else values
    assert all(len(values) == table["length"] for values in columns.values())
    return pd.DataFrame(columns)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(-(2**31), 2**31),
            st.text(max_size=8),
            st.floats(allow_nan=False, allow_infinity=False, width=32),
        ),
        max_size=30,
    )
)
def test_packing_loses_nothing_but_digits(rows: list[tuple[int, str, float]]):
    table = pd.DataFrame(rows, columns=["number", "text", "value"]).astype(
        {"number": "int64", "text": object, "value": "float64"}
    )
    again = unpacked(json.loads(json.dumps(packed(table))))
    assert again["number"].tolist() == table["number"].tolist()
    assert again["text"].tolist() == table["text"].tolist()
    np.testing.assert_allclose(again["value"].astype(float), table["value"], rtol=5.001e-5)  # five digits


def test_runs_of_equal_steps_take_no_room():
    table = pd.DataFrame({"block": list(range(1000)) * 3, "run": ["a"] * 3000})
    assert len(json.dumps(packed(table))) < 200


def test_what_is_not_finite_is_null():
    table = pd.DataFrame({"value": [1.5, math.nan, math.inf, -math.inf]})
    assert packed(table)["columns"][0]["values"] == [1.5, None, None, None]


def test_numbers_are_means_over_samples():
    profile = made_up({"token_similarity": [0.1, 0.5, 0.9]})
    profile.frame.loc[profile.frame["sample"] == 1, "value"] += 0.02
    table = numbers_of(profile)
    found = table[(table["measure"] == "token_similarity") & (table["block"] == 2)]
    assert found["value"].tolist() == [pytest.approx(0.91)]


def test_which_feature_is_largest_has_no_mean():
    profile = made_up({"token_similarity": [0.1, 0.5], "largest_feature": [3.0, 60.0]})
    assert set(numbers_of(profile)["measure"]) == set(profile.names()) - {"largest_feature"}


def test_rows_are_chosen_by_columns():
    table = pd.DataFrame({"a": [1, 2, 3], "b": ["x", "y", "x"]})
    assert chosen(table, {"b": ("x",), "a": (2, 3)})["a"].tolist() == [3]
    assert len(chosen(table, {})) == 3
