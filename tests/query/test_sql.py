"""Conditions as text: the same answers as SQLite for what is allowed, and a MaskError for everything else."""

import contextlib
import inspect
import json
import sqlite3
import subprocess
import sys
import time

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hostile
from dualform.errors import MaskError
from dualform.query import sql
from dualform.query.conditions import evaluate, matching_groups, read_condition
from dualform.query.sql import parse_condition

TABLE = pl.DataFrame(
    {
        "label": [0, 1, 7, -3, None, 1000],
        "step": [0, 1, 2, 3, 4, 5],
        "size": [0.5, -0.0, 1e70, 0.1, None, 2.0],
        "task": ["early", "late", "", "it's\nlate", None, "50%_\\"],
        "flag": [True, False, True, None, False, True],
        'a "b"': [1, 2, 3, 4, 5, None],
        "order": [5, 4, 3, 2, 1, 0],
    }
)


def answer(text, table=TABLE):
    return table.with_columns(mask=parse_condition(text, "where"))["mask"].to_list()


def matching(text):
    """The steps at which a condition is true."""
    return [step for step, found in enumerate(answer(text)) if found]


# Random conditions of what is allowed, answered by SQLite too. What differs there, as documented, is not drawn: division by zero and
# remainders of negative numbers, which have tests of their own.

COLUMNS = 'label INTEGER, step INTEGER, size REAL, task TEXT, flag BOOLEAN, "a ""b""" INTEGER, "order" INTEGER'


@pytest.fixture(scope="module")
def sqlite():
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.execute("PRAGMA case_sensitive_like = ON")
        database.execute(f"CREATE TABLE rows ({COLUMNS})")
        database.executemany("INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?, ?)", TABLE.rows())
        yield database


def answer_of_sqlite(text, database):
    text = text.replace(" / ", " * 1.0 / ")  # 7 / 2 is 3 in SQLite
    found = database.execute(f"SELECT {text} FROM rows ORDER BY rowid").fetchall()
    return [None if value is None else bool(value) for (value,) in found]


NUMBERS = st.sampled_from(["0", "1", "7", "-3", "2", "5e-1", "1e2", "1000", "-125E-2", "0.5", "2.", "0.1"])
TEXTS = st.sampled_from(["'early'", "'late'", "''", "'it''s'", "'50%_\\'", "'é'"])
NUMERIC = st.sampled_from(["label", "step", "size", '"a ""b"""'])


@st.composite
def numbers(draw, depth=2):
    if not depth or draw(st.booleans()):
        return draw(NUMERIC | NUMBERS)
    kind = draw(st.sampled_from(["+", "-", "*", "/", "%", "minus", "()"]))
    if kind == "minus":
        return f"- {draw(NUMERIC)}"
    if kind == "()":
        return f"({draw(numbers(depth - 1))})"
    if kind == "%":
        divisor = draw(st.sampled_from(["2", "3", "0", '"order"']))
        return f"(step % {divisor})"
    if kind == "/":
        divisor = draw(st.sampled_from(["2", "4", "0.1", "-1", '"a ""b"""']))
        return f"({draw(NUMERIC)} / {divisor})"
    return f"{draw(numbers(depth - 1))} {kind} {draw(numbers(depth - 1))}"


@st.composite
def comparisons(draw):
    compare = draw(st.sampled_from(["=", "<>", "!=", "<", "<=", ">", ">="]))
    negated = draw(st.sampled_from(["", "NOT ", "not "]))
    kind = draw(st.sampled_from(["number", "text", "in", "texts", "between", "like", "null", "flag", "literal"]))
    if kind == "number":
        return f"{draw(numbers())} {compare} {draw(numbers())}"
    if kind == "text":
        return f"task{compare}{draw(TEXTS)}"
    if kind == "in":
        entries = draw(st.lists(NUMBERS | st.just("NULL"), min_size=1, max_size=4))
        return f"{draw(NUMERIC)} {negated}IN ({', '.join(entries)})"
    if kind == "texts":
        return f"task {negated}in ({', '.join(draw(st.lists(TEXTS, min_size=1, max_size=3)))})"
    if kind == "between":
        return f"{draw(NUMERIC)} {negated}BETWEEN {draw(NUMBERS)} AND {draw(numbers())}"
    if kind == "like":
        pattern = draw(st.text("%_aelty.*\\[", max_size=6))
        return f"task {negated}LIKE '{pattern}'"
    if kind == "null":
        return f"{draw(NUMERIC | st.just('task'))} IS {negated}NULL"
    if kind == "flag":
        return draw(st.sampled_from(["flag", "flag = true", "flag <> FALSE"]))
    return draw(st.sampled_from(["TRUE", "false"]))


@st.composite
def allowed(draw, depth=3):
    if not depth or draw(st.booleans()):
        return draw(comparisons())
    kind = draw(st.sampled_from(["AND", "OR", "and", "NOT", "()"]))
    if kind == "NOT":
        return f"NOT {draw(comparisons())}"
    if kind == "()":
        return f"({draw(allowed(depth - 1))})"
    return f"{draw(allowed(depth - 1))} {kind} {draw(allowed(depth - 1))}"


@given(text=allowed())
@settings(max_examples=400)
def test_what_is_allowed_means_what_it_means_in_sql(sqlite, text):
    assert answer(text) == answer_of_sqlite(text, sqlite), text


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("label = 7", [2]),
        ("label <> 7", [0, 1, 3, 5]),
        ("label IN (7, -3, 2.0)", [2, 3]),
        ("label NOT IN (7, -3)", [0, 1, 5]),
        ("label IN (7, NULL)", [2]),
        ("size IN (2, 0.1)", [3, 5]),
        ("label BETWEEN 0 AND 1", [0, 1]),
        ("label NOT BETWEEN 0 AND 1", [2, 3, 5]),
        ("label IS NULL", [4]),
        ("label IS NOT NULL AND NOT flag", [1]),
        ('"a ""b""" >= 4', [3, 4]),
        ("order = 5 OR \"order\" = 0", [0, 5]),
        ("label / 2 = 3.5", [2]),
        ("-label = 3", [3]),
        ("- -label = 7", [2]),
        ("+label = +7", [2]),
        ("step * 2 + 1 > 3 * (step - 1) AND step % 2 = 1", [1, 3]),
        ("task < 'f' AND task > ''", [0, 5]),
        ("size > 1e69", [2]),
        ("label + 4611686018427387904 = 4611686018427388904", [5]),
        ("TRUE", [0, 1, 2, 3, 4, 5]),
        ("1 = 1 AND step = 2", [2]),
    ],
)  # fmt: skip
def test_conditions(text, steps):
    found = TABLE.with_columns(mask=parse_condition(text, "where"))["mask"].to_list()
    assert [step for step, true in enumerate(found) if true] == steps


def test_names_are_taken_as_they_are_written():
    with pytest.raises(pl.exceptions.ColumnNotFoundError, match="Step"):
        answer("Step = 1")


def test_division_by_zero_gives_infinity_or_nan_and_its_remainder_is_null():
    table = pl.DataFrame({"x": [7, -7, 0]})
    assert answer("x / 0 > 1e300", table) == [True, False, True]  # NaN is larger than every number
    assert answer("x / 0 < -1e300", table) == [False, True, False]
    assert answer("x % 0 IS NULL", table) == [True, True, True]


def test_a_remainder_has_the_sign_of_the_divisor_as_in_python():
    table = pl.DataFrame({"x": [-7, -7, 7], "y": [2, -2, -2]})
    assert answer("x % y = 1", table) == [-7 % 2 == 1, -7 % -2 == 1, 7 % -2 == 1]


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("a.c", ["a.c"]),
        ("a_c", ["a.c", "abc", "a\nc"]),
        ("%", ["a.c", "abc", "a\nc", "(a+)+$", "[x]", "a\\c%", "", "^a", "abc\n"]),
        ("(a+)+$", ["(a+)+$"]),
        ("[x]", ["[x]"]),
        ("a\\c\\%", []),
        ("a\\c%", ["a\\c%"]),
        ("^a", ["^a"]),
        ("abc", ["abc"]),  # and not "abc\n"
        ("", [""]),
        ("a%c", ["a.c", "abc", "a\nc"]),
        ("%%%c", ["a.c", "abc", "a\nc"]),
        ("A.C", []),
    ],
)
def test_like_has_two_wildcards_and_nothing_else(pattern, matches):
    texts = ["a.c", "abc", "a\nc", "(a+)+$", "[x]", "a\\c%", "", "^a", "abc\n"]
    table = pl.DataFrame({"task": texts})
    found = table.filter(parse_condition(f"task LIKE '{pattern}'", "where"))["task"].to_list()
    assert found == [text for text in texts if text in matches]
    rest = table.filter(parse_condition(f"task NOT LIKE '{pattern}'", "where"))["task"].to_list()
    assert rest == [text for text in texts if text not in matches]


def test_like_takes_no_time():
    table = pl.DataFrame({"task": ["a" * 20_000] * 5})
    began = time.perf_counter()
    for pattern in ("%a" * 100, "_" * 200, "%_" * 100, "a%" * 99 + "b"):
        table.select(parse_condition(f"task LIKE '{pattern}'", "where"))
    assert time.perf_counter() - began < 5


# What is not allowed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lower(task) = 'x'", r"functions such as lower\(…\) are not allowed"),
        ("(SELECT 1) = 1", "unexpected SELECT"),
        ("step IN (SELECT 1)", "unexpected SELECT"),
        ("CASE WHEN flag THEN true END", "unexpected CASE"),
        ("step::text = '1'", "unexpected '::'"),
        ("step = 1; step = 2", "unexpected ';'"),
        ("rows.step = 1", r"unexpected '\.'"),
        ("step = 1 -- note", "comments are not allowed"),
        ("/* note */ step = 1", "comments are not allowed"),
        ("task LIKE '!%' ESCAPE '!'", "unexpected ESCAPE"),
        ("task LIKE task", "LIKE expects a pattern in quotes"),
        ("task ILIKE 'x'", "unexpected ILIKE"),
        ("flag IS TRUE", "IS expects NULL or NOT NULL"),
        ("step IN ()", "IN expects a list"),
        ("step IN (step, 1)", "IN expects a list of numbers or texts"),
        ("step IN (1 + 1)", "IN expects a list of numbers or texts"),
        ("step BETWEEN SYMMETRIC 1 AND 2", "unexpected"),
        ("step = 1 = true", "comparison cannot be compared"),
        ("(step = 1) IS NULL", "comparison cannot be compared"),
        ("step + 1", "expected true or false"),
        ("step = 1 AND 7", "expected true or false"),
        ("(1, 2) = 1", "unexpected Tuple"),
        ("step =", "cannot be parsed"),
        ("step = 1)", "cannot be parsed"),
        ("task = 'x", "Is a quote missing"),
        ("", "it is empty"),
        ("step = 9223372036854775808", "is beyond 64 bits"),
        ("step = 1e999", "is too large"),
        ('"*" = 1', "for a pattern"),
        ('"^s.*$" = 1', "for a pattern"),
        ("task = '\ud800'", "not valid Unicode"),
    ],
)
def test_what_is_not_allowed_is_named_and_the_allowed_is_listed(text, words):
    with pytest.raises(
        MaskError, match=rf"^where: .* is not an SQL condition: .*{words}.*Allowed are the names of columns"
    ):
        parse_condition(text, "where")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("step = 1 OR " * 1000 + "step = 1", "characters, more than 10000"),
        ("a=1 OR " * 1200 + "a=1", "words and signs, more than 2000"),
        (f"task = '{'x' * 1001}'", "more than 1000 characters"),
        (f"{'x' * 1001} = 1", "more than 1000 characters"),
        (f"task LIKE '{'x' * 201}'", "pattern has 201 characters, more than 200"),
        (f"step IN ({', '.join(map(str, range(501)))})", "501 values, more than 500"),
        ("(" * 21 + "flag" + ")" * 21, "nested deeper than 20 levels"),
        ("NOT " * 21 + "flag", "nested deeper than 20 levels"),
        ("step = " + "- " * 21 + "1", "nested deeper than 20 levels"),
        ("NOT (" * 11 + "flag" + ")" * 11, "nested deeper than 20 levels"),
        ("step" + "+1" * 60 + " = 1", "more than 50 calculations on top of each other"),
        (f"{'(step+step)*(step+step)' + '+1' * 5} IN ({', '.join(map(str, range(500)))})", "too large"),
    ],
)  # fmt: skip
def test_sizes_are_bounded(text, words):
    with pytest.raises(MaskError, match=words):
        parse_condition(text, "where")


def test_large_conditions_within_the_bounds_are_answered_at_once():
    began = time.perf_counter()
    assert matching(f"step IN ({', '.join(map(str, range(500)))})") == [0, 1, 2, 3, 4, 5]
    assert matching(" OR ".join(f"step = {number}" for number in range(3, 400))) == [3, 4, 5]
    assert matching("(" * 20 + "flag" + ")" * 20) == [0, 2, 5]
    assert matching("step" + "+1" * 45 + " = 47") == [2]
    assert time.perf_counter() - began < 5


def test_where_little_is_left_of_the_stack_deep_nesting_is_refused_too():
    nested = "(" * sql.MAX_NESTING + "flag" + ")" * sql.MAX_NESTING

    def parse_below(calls):
        return parse_below(calls - 1) if calls else parse_condition(nested, "where")

    free = sys.getrecursionlimit() - len(inspect.stack(0))
    with pytest.raises(MaskError, match="nested too deep"):
        parse_below(free - 200)


def test_the_message_repeats_only_the_beginning_of_a_long_text():
    with pytest.raises(MaskError) as caught:
        parse_condition("lower(task) = '" + "x" * 900 + "'", "where")
    assert len(str(caught.value)) < 700


# Files and addresses


@pytest.mark.skipif(sys.platform != "linux", reason="needs inotify")
def test_no_condition_opens_a_file(tmp_path):
    secret = tmp_path / "secret.csv"
    secret.write_text("my-password,other\n1,2\n")
    with hostile.opened(secret) as was_opened:
        for text in hostile.conditions(secret):
            with pytest.raises((MaskError, pl.exceptions.PolarsError)) as caught:
                answer(text)
            assert "my-password" not in str(caught.value)
            assert not was_opened(), text
        secret.read_text()
        assert was_opened()  # it would have been seen


def test_a_file_that_exists_gives_the_same_error_as_one_that_does_not(tmp_path):
    there, missing = tmp_path / "a.csv", tmp_path / "b.csv"
    there.write_text("secret\n1\n")
    for one, other in zip(hostile.conditions(there), hostile.conditions(missing), strict=True):
        problems = []
        for text in (one, other):
            with pytest.raises((MaskError, pl.exceptions.PolarsError)) as caught:
                answer(text)
            problems.append(str(caught.value).replace(str(there), "").replace(str(missing), ""))
        assert problems[0] == problems[1]


READ_ALL = """
import json, sys
from dualform.errors import MaskError
from dualform.query.conditions import read_condition
for text in json.load(sys.stdin):
    try:
        read_condition(text, "where")
    except MaskError:
        pass
"""


def test_no_condition_sends_a_request(tmp_path):
    """In another process, since a request that blocks this one would keep our server from answering it."""
    secret = tmp_path / "secret.csv"
    secret.write_text("secret\n1\n")
    with hostile.listening() as (url, seen):
        texts = [text for text in hostile.conditions(secret, url) if url in text]
        read = subprocess.run(
            [sys.executable, "-c", READ_ALL], input=json.dumps(texts), text=True, timeout=60, check=False
        )
    assert len(texts) > 1
    assert seen == []
    assert read.returncode == 0


def test_hostile_conditions_are_refused_at_once(tmp_path):
    for text in hostile.conditions(tmp_path / "none.csv"):
        began = time.perf_counter()
        with pytest.raises(MaskError):
            evaluate(read_condition(text, "where"), TABLE, "where")
        assert time.perf_counter() - began < 1, text


# Whatever else

WORDS = [
    "step", "label", "task", "flag", "size", '"order"', "nothing", "1", "-2", "0.5", "1e3", "'early'", "'%'", "NULL", "TRUE", "FALSE",
    "=", "<>", "<", "<=", ">", ">=", "AND", "OR", "NOT", "IN", "(", ")", "(1, 2)", ",", "BETWEEN", "LIKE", "IS", "+", "-", "*", "/", "%",
    "SELECT", "FROM", "CASE", "WHEN", "read_csv", "lower(", "::", ";", "--", "/*", "[", "]", "{", "}", ".", ":", "?", "@", "$1", "\\", "||",
    "ESCAPE", "ANY", "DATE", "INTERVAL", "CURRENT_DATE", "EXISTS", "DISTINCT", "OVER", "UNION", "WITH", "é", "\x00", "9" * 30, "''''",
]  # fmt: skip


@given(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join) | st.text(max_size=60) | st.text("()'\"ab1=<>%_- ,"))
@settings(max_examples=1500)
@example("NOT NULL")
@example("task + 1 = 'x'")
@example("flag + flag = 1")
@example("1 % 0 = step")
@example("9223372036854775807 + 1 = step")
@example("-(-9223372036854775808) = step")
@example("9223372036854775807 * step > 1")
@example("task BETWEEN 1 AND 'x'")
def test_any_text_gives_true_and_false_or_a_mask_error(text):
    try:
        found = evaluate(read_condition(text, "where"), TABLE, "where")
    except MaskError:
        return
    assert found.shape == (TABLE.height,)
    assert found.dtype == bool


def test_conditions_on_one_row_are_answered_from_groups():
    """Every node that a text can have is known to look at a single row, so that totals answer it without a scan."""
    groups = pl.DataFrame({"label": [1, 2, 3], "task": ["a", "b", "c"]})
    for text in (
        "label = 1 OR label IN (2, -3) AND NOT task LIKE 'a%'",
        "label NOT BETWEEN 1 AND 2",
        "-label + 1 - 2 * label / 3 > label % 2",
        "task IS NOT NULL",
        "TRUE",
    ):
        assert matching_groups(text, groups, None, "where") is not None, text


def test_bounds_leave_room_for_what_the_page_writes():
    """Forty classes switched off, and a hundred single examples of two columns."""
    names = " , ".join(f"'{'n' * 20}{number}'" for number in range(40))
    examples = " OR ".join(f'("task" = \'late\' AND "step" = {number})' for number in range(100))
    assert matching(f'"task" IN ({names}) OR ("step" BETWEEN 1 AND 2) OR {examples}') == [1, 2]
    assert sql.MAX_LENGTH > 1500
