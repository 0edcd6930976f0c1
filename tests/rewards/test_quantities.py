"""Units, currency and times of day: what is read, in which unit, and what is left alone."""

from fractions import Fraction

import pytest

from vapo_megatron.rewards.equivalence import quantity, time_of_day


@pytest.mark.parametrize(
    ("text", "value", "dimension", "scale"),
    [
        (r"35\text{cm}", "35", "length^1", "1/100"),
        (r"35 \mathrm{ CM. }", "35", "length^1", "1/100"),
        (r"\frac{1}{2}\text{ m}^2", r"\frac{1}{2}", "length^2", "1"),
        (r"2 \text{cm}^{3}", "2", "length^3", "1/1000000"),
        ("5 km^2", "5", "length^2", "1000000"),
        ("1,000 miles", "1,000", "length^1", "1609344/1000"),
        (r"3 \text{square feet}", "3", "length^2", "9290304/100000000"),
        ("3 cubic yards", "3", "length^3", "764554857984/1000000000000"),
        ("5 m/s", "5", "speed^1", "1"),
        ("60 miles per hour", "60", "speed^1", "1609344/3600000"),
        ("-2 1/2 hours", "-2 1/2", "time^1", "3600"),
        (r"\$5.50", "5.50", "dollar", "1"),
        ("-$3", "-3", "dollar", "1"),
        ("€20", "20", "euro", "1"),
        (r"\text{£}7", "7", "sterling", "1"),
        ("2 million", "2", "count^1", "1000000"),
        (r"2\text{ hundred}", "2", "count^1", "100"),
        ("5 trillion", "5", "count^1", "1000000000000"),
    ],
)
def test_a_quantity_is_its_value_and_its_unit(
    text: str, value: str, dimension: str, scale: str
) -> None:
    found = quantity(text)
    assert found is not None
    assert (found.value, found.dimension, found.scale) == (value, dimension, Fraction(scale))


@pytest.mark.parametrize(
    "text",
    [
        "35",
        "35 apples",
        "square",
        "5 square",
        r"5\text{ }",
        "x cm",
        r"\text{cm}",
        "5 cm cm",
        "5m/s",
        "$",
    ],
)
def test_what_has_no_known_unit_is_no_quantity(text: str) -> None:
    assert quantity(text) is None


@pytest.mark.parametrize(
    ("text", "minutes", "half_is_stated"),
    [
        (r"4:30\text{ p.m.}", 16 * 60 + 30, True),
        ("9 AM", 9 * 60, True),
        ("12 a.m.", 0, True),
        ("12:05 pm", 12 * 60 + 5, True),
        ("16:30", 16 * 60 + 30, True),
        ("12:59", 12 * 60 + 59, False),
        ("13:00", 13 * 60, True),
        (r"\text{7:00}", 7 * 60, False),
    ],
)
def test_a_time_of_day_is_its_minutes_since_midnight(
    text: str, minutes: int, half_is_stated: bool
) -> None:
    assert time_of_day(text) == (minutes, half_is_stated)


@pytest.mark.parametrize("text", ["16", "4:3", "at 4:30", "p.m.", "4:30 x.m."])
def test_what_is_no_time_of_day_is_left_alone(text: str) -> None:
    assert time_of_day(text) is None
