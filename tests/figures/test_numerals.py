"""Numbers are short, and say no more than they know."""

from dualform.figures.numerals import alike, short, signed, together


def test_short_numbers():
    assert [short(number) for number in (0.04, 12.34, 123.4, 1234, 56_789, -2.5e6, 3.2e9)] == [
        "0.0", "12.3", "123", "1.2k", "57k", "−2.5M", "3.2G",
    ]  # fmt: skip


def test_the_numbers_of_an_axis_share_a_unit():
    assert together([0.0, 500_000.0, 1e6]) == ["0", "0.5M", "1M"]
    assert together([-0.25, 0.0, 0.25]) == ["−0.25", "0", "0.25"]
    assert together([]) == []


def test_numbers_side_by_side_have_the_same_digits():
    assert alike([17.2, 49.55, 3.0]) == ["17.2", "49.5", "3.0"]
    assert alike([-0.001, 0.25]) == ["0.00", "0.25"]
    assert signed(-3.14159, 2) == "−3.14"
