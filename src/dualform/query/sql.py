"""Conditions written as SQL text, turned into Polars expressions.

The text may come from a browser, so it must not be able to do anything but compare columns. It is checked three times: its size,
then its tokens (names, literals and a few operators, but no function calls), then the nodes of the tree that sqlglot parses. What is
not on the lists below is refused. The expression is built from Polars' own operators, so no text reaches an SQL interpreter.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import polars as pl
from sqlglot import Token, Tokenizer, TokenType, exp
from sqlglot.errors import SqlglotError
from sqlglot.parser import Parser

from dualform.errors import MaskError

ALLOWED = (
    "Allowed are the names of columns, numbers, 'text', TRUE, FALSE, NULL, = <> < <= > >=, IN (…), BETWEEN … AND …, LIKE, "
    "IS NULL, AND, OR, NOT, + - * / % and parentheses."
)
MAX_LENGTH = 10_000
"""Characters of a condition."""
MAX_TOKENS = 2_000
MAX_LITERAL = 1_000
"""Characters of a single name, number or text."""
MAX_PATTERN = 200
"""Characters of a LIKE pattern."""
MAX_LIST = 500
"""Entries of an IN list."""
MAX_NESTING = 20
"""Parentheses and prefixes (NOT, -) around each other; sqlglot's parser recurses this deep."""
MAX_HEIGHT = 50
"""Height of the expression; the time that Polars needs grows with its square."""
MAX_SIZE = 5_000
"""Nodes of the Polars expression."""
SHOWN = 200
"""Characters of the text that are quoted in a message."""

PREFIXES = {TokenType.NOT, TokenType.DASH, TokenType.PLUS}
OPERATORS = PREFIXES | {
    TokenType.AND, TokenType.OR, TokenType.IN, TokenType.BETWEEN, TokenType.LIKE, TokenType.IS,
    TokenType.EQ, TokenType.NEQ, TokenType.LT, TokenType.LTE, TokenType.GT, TokenType.GTE,
    TokenType.STAR, TokenType.SLASH, TokenType.MOD, TokenType.COMMA, TokenType.L_PAREN, TokenType.R_PAREN,
}  # fmt: skip
LITERALS = {TokenType.NUMBER, TokenType.STRING, TokenType.NULL, TokenType.TRUE, TokenType.FALSE}
NAMES = {TokenType.VAR, TokenType.IDENTIFIER}

Binary = Callable[[Any, Any], pl.Expr]
COMPARISONS: dict[type[exp.Expr], Binary] = {
    exp.EQ: operator.eq,
    exp.NEQ: operator.ne,
    exp.LT: operator.lt,
    exp.LTE: operator.le,
    exp.GT: operator.gt,
    exp.GTE: operator.ge,
}
ARITHMETIC: dict[type[exp.Expr], Binary] = {
    exp.Add: operator.add,
    exp.Sub: operator.sub,
    exp.Mul: operator.mul,
    exp.Div: operator.truediv,
    exp.Mod: operator.mod,
}
CONNECTIVES: dict[type[exp.Expr], Binary] = {exp.And: operator.and_, exp.Or: operator.or_}


class _RefusedError(Exception):
    """Why a text is not a condition."""


def parse_condition(text: str, name: str) -> pl.Expr:
    """Return the Polars expression of a condition in SQL. name: the argument it was given as, for messages."""
    try:
        tokens = _checked(_tokens(text))
        return _Builder().condition(_tree(tokens, text))
    except _RefusedError as refused:
        shown = text if len(text) <= SHOWN else text[:SHOWN] + "…"
        raise MaskError(f"{name}: {shown!r} is not an SQL condition: {refused} {ALLOWED}") from None


def _tokens(text: str) -> list[Token]:
    """Split a text into tokens, if its size is within bounds."""
    if len(text) > MAX_LENGTH:
        raise _RefusedError(f"it has {len(text)} characters, more than {MAX_LENGTH}.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _RefusedError("it is not valid Unicode.") from None
    try:
        tokens = Tokenizer().tokenize(text)
    except SqlglotError:
        raise _RefusedError("it cannot be split into words. Is a quote missing?") from None
    if not tokens:
        raise _RefusedError("it is empty.")
    if len(tokens) > MAX_TOKENS:
        raise _RefusedError(f"it has {len(tokens)} words and signs, more than {MAX_TOKENS}.")
    return tokens


def _checked(tokens: Sequence[Token]) -> list[Token]:
    """Refuse what cannot be part of a condition before it reaches the parser, and mark names as names.

    A word that is not one of our operators names a column, even if it is a keyword of SQL: `date`, `order`, `type`.
    """
    checked: list[Token] = []
    previous: Token | None = None
    nesting = _Nesting()
    for token in tokens:
        _check_token(token)
        if previous is not None and _is_operand(previous):
            _check_after_operand(previous, token)
        nesting.enter(token.token_type)
        previous = token
        is_name = _is_operand(token) and token.token_type not in LITERALS
        checked.append(Token(TokenType.IDENTIFIER, token.text) if is_name else token)
    return checked


def _check_after_operand(operand: Token, token: Token) -> None:
    if token.token_type is TokenType.L_PAREN:
        raise _RefusedError(f"functions such as {_shown(operand)}(…) are not allowed.")
    if _is_operand(token):
        keyword = operand if _is_keyword(operand) else token
        raise _RefusedError(f"unexpected {_shown(keyword)}.")


class _Nesting:
    """Counts how deep a condition is nested, by parentheses and by prefixes such as NOT."""

    def __init__(self) -> None:
        self._depth = 0
        self._around = [0]
        """The depth inside each open parenthesis; the first entry is that outside of all."""

    def enter(self, kind: TokenType) -> None:
        """Go on to the next token."""
        if kind is TokenType.L_PAREN:
            self._depth += 1
            self._around.append(self._depth)
        elif kind in PREFIXES:
            self._depth += 1
        else:
            if kind is TokenType.R_PAREN and len(self._around) > 1:
                self._around.pop()
            self._depth = self._around[-1]
        if self._depth > MAX_NESTING:
            raise _RefusedError(f"it is nested deeper than {MAX_NESTING} levels.")


def _check_token(token: Token) -> None:
    if token.comments:
        raise _RefusedError("comments are not allowed.")
    if len(token.text) > MAX_LITERAL:
        raise _RefusedError(f"a name or value has more than {MAX_LITERAL} characters.")
    if token.token_type not in OPERATORS and not _is_operand(token):
        raise _RefusedError(f"unexpected {_shown(token)!r}.")


def _is_operand(token: Token) -> bool:
    """Whether a token is a name or a literal."""
    if token.token_type in OPERATORS:
        return False
    return token.token_type in LITERALS or token.token_type is TokenType.IDENTIFIER or token.text.isidentifier()


def _is_keyword(token: Token) -> bool:
    return token.token_type not in LITERALS and token.token_type not in NAMES


def _shown(token: Token) -> str:
    return token.text if len(token.text) <= SHOWN else token.text[:SHOWN] + "…"


def _tree(tokens: list[Token], text: str) -> exp.Expr:
    try:
        [tree] = Parser().parse_into(exp.Condition, tokens, text)
    except SqlglotError:
        raise _RefusedError("it cannot be parsed.") from None
    except RecursionError:
        raise _RefusedError("it is nested too deep.") from None
    if tree is None:
        raise _RefusedError("it is empty.")
    return tree


class _Builder:
    """Builds an expression from a tree, with a bound on its size.

    A condition (true or false) and a value are two things: conditions are joined by AND, OR and NOT, values are calculated with and
    compared. A column may be either. So `a = b = c`, which databases read in different ways, is refused.
    """

    def __init__(self) -> None:
        self._size = 0

    def condition(self, node: exp.Expr, height: int = 0) -> pl.Expr:
        """Return the expression of a condition, which is true or false."""
        self._count(height)
        kind = type(node)
        if kind is exp.Paren:
            return self.condition(_only(node, "this").this, height + 1)
        if kind in CONNECTIVES:
            parts = [self.condition(part, height + 1) for part in _chain(node)]
            return _balanced(CONNECTIVES[kind], parts)
        if kind is exp.Not:
            return ~self.condition(_only(node, "this").this, height + 1)
        if kind in COMPARISONS:
            left, right = self._operands(node, height)
            return COMPARISONS[kind](left, right)
        if kind in TESTS:
            return self._test(node, height)
        if kind in OPERANDS:
            return OPERANDS[kind](node)
        if kind is exp.Null:
            return pl.lit(None, dtype=pl.Boolean)
        if kind in (exp.Literal, exp.Neg, *ARITHMETIC):
            raise _RefusedError("expected true or false, e.g. a comparison, instead of a value.")
        raise _RefusedError(f"unexpected {kind.__name__}.")

    def value(self, node: exp.Expr, height: int = 0) -> pl.Expr:
        """Return the expression of a value: a number, a text or a truth value."""
        self._count(height)
        kind = type(node)
        if kind is exp.Paren:
            return self.value(_only(node, "this").this, height + 1)
        if kind in ARITHMETIC:
            left, right = self._operands(node, height)
            return ARITHMETIC[kind](left, right)
        if kind is exp.Neg:
            return self._negative(_only(node, "this").this, height)
        if kind in OPERANDS:
            return OPERANDS[kind](node)
        if kind is exp.Literal:
            return pl.lit(node.this) if node.is_string else _number(node.this)
        if kind is exp.Null:
            return pl.lit(None)
        if kind in (exp.Not, *COMPARISONS, *CONNECTIVES, *TESTS):
            raise _RefusedError("a comparison cannot be compared or calculated with; join comparisons by AND or OR.")
        raise _RefusedError(f"unexpected {kind.__name__}.")

    def _test(self, node: exp.Expr, height: int) -> pl.Expr:
        condition = TESTS[type(node)](self, node, height)
        # sqlglot writes NOT LIKE into the node, and NOT IN around it, depending on its version
        return ~condition if node.args.get("negate") else condition

    def _negative(self, operand: exp.Expr, height: int) -> pl.Expr:
        if isinstance(operand, exp.Literal) and not operand.is_string:
            return _number(f"-{operand.this}")
        return -self.value(operand, height + 1)

    def is_in(self, node: exp.Expr, height: int) -> pl.Expr:
        """x IN (a, b) is x = a OR x = b, for null and numbers of either kind, too."""
        entries = _only(node, "this", "expressions", "negate").expressions
        if not entries:
            raise _RefusedError("IN expects a list of numbers or texts.")
        if len(entries) > MAX_LIST:
            raise _RefusedError(f"IN has {len(entries)} values, more than {MAX_LIST}.")
        before = self._size
        value = self.value(node.this, height + 1)
        self._size += (self._size - before) * len(entries)  # the value is repeated for each entry
        equal = []
        for entry in entries:
            if not _is_literal(entry):
                raise _RefusedError("IN expects a list of numbers or texts.")
            equal.append(value == self.value(entry, height + 1))
        return _balanced(operator.or_, equal)

    def between(self, node: exp.Expr, height: int) -> pl.Expr:
        """Both ends included."""
        _only(node, "this", "low", "high", "negate")
        value = self.value(node.this, height + 1)
        low = self.value(node.args["low"], height + 1)
        high = self.value(node.args["high"], height + 1)
        return value.is_between(low, high)

    def like(self, node: exp.Expr, height: int) -> pl.Expr:
        """% stands for any text and _ for any character; everything else stands for itself."""
        pattern = _only(node, "this", "expression", "negate").expression
        if not (isinstance(pattern, exp.Literal) and pattern.is_string):
            raise _RefusedError("LIKE expects a pattern in quotes.")
        return self.value(node.this, height + 1).str.contains(_regex(pattern.this))

    def is_null(self, node: exp.Expr, height: int) -> pl.Expr:
        """IS NULL."""
        if not isinstance(_only(node, "this", "expression", "negate").expression, exp.Null):
            raise _RefusedError("IS expects NULL or NOT NULL.")
        return self.value(node.this, height + 1).is_null()

    def _operands(self, node: exp.Expr, height: int) -> tuple[pl.Expr, pl.Expr]:
        _only(node, "this", "expression")
        return self.value(node.this, height + 1), self.value(node.expression, height + 1)

    def _count(self, height: int) -> None:
        self._size += 1
        if self._size > MAX_SIZE:
            raise _RefusedError("it is too large to be evaluated.")
        if height > MAX_HEIGHT:
            raise _RefusedError(f"it has more than {MAX_HEIGHT} calculations on top of each other.")


TESTS: dict[type[exp.Expr], Callable[[_Builder, exp.Expr, int], pl.Expr]] = {
    exp.In: _Builder.is_in,
    exp.Between: _Builder.between,
    exp.Like: _Builder.like,
    exp.Is: _Builder.is_null,
}


def _only(node: exp.Expr, *known: str) -> exp.Expr:
    """Return the node, if it says nothing beyond these parts: BETWEEN SYMMETRIC, IN (SELECT …) and the like are refused."""
    for part, content in node.args.items():
        if content and part not in known:
            raise _RefusedError(f"unexpected {part} of {type(node).__name__.upper()}.")
    return node


def _chain(node: exp.Expr) -> list[exp.Expr]:
    """Return the parts of a AND b AND c, or of a OR b OR c, which sqlglot nests to the left."""
    kind = type(node)
    parts = []
    while type(node) is kind:
        parts.append(_only(node, "this", "expression").expression)
        node = node.this
    return [node, *reversed(parts)]


def _balanced(join: Binary, parts: list[pl.Expr]) -> pl.Expr:
    """Join expressions pairwise, so that a long chain does not become a deep tree."""
    while len(parts) > 1:
        pairs = [join(left, right) for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


def _column(node: exp.Expr) -> pl.Expr:
    identifier = _only(node, "this").this
    if not isinstance(identifier, exp.Identifier):
        raise _RefusedError("unexpected *.")
    name = identifier.name
    if name == "*" or (name.startswith("^") and name.endswith("$")):
        raise _RefusedError(f"Polars would take the name {name!r} for a pattern. Use a Polars expression instead.")
    return pl.col(name)


def _truth(node: exp.Expr) -> pl.Expr:
    return pl.lit(bool(node.this))


OPERANDS: dict[type[exp.Expr], Callable[[exp.Expr], pl.Expr]] = {exp.Column: _column, exp.Boolean: _truth}
"""What may be a condition or a value."""


def _is_literal(node: exp.Expr) -> bool:
    if isinstance(node, (exp.Paren, exp.Neg)):
        return _is_literal(node.this)
    return isinstance(node, (exp.Literal, exp.Boolean, exp.Null))


def _number(text: str) -> pl.Expr:
    if re.fullmatch(r"-?[0-9]+", text):
        whole = int(text)
        if not -(2**63) <= whole < 2**63:
            raise _RefusedError(f"{text} is beyond 64 bits.")
        return pl.lit(whole)
    if not re.fullmatch(r"-?[0-9]+\.?[0-9]*([eE][+-]?[0-9]+)?", text):
        raise _RefusedError(f"{text} is not a number.")
    number = float(text)
    if not math.isfinite(number):
        raise _RefusedError(f"{text} is too large.")
    return pl.lit(number)


def _regex(pattern: str) -> str:
    """Return a LIKE pattern as a regular expression. Polars matches these in linear time."""
    if len(pattern) > MAX_PATTERN:
        raise _RefusedError(f"a LIKE pattern has {len(pattern)} characters, more than {MAX_PATTERN}.")
    wildcards = {"%": ".*", "_": "."}
    parts = re.split(r"(%+|_)", pattern)
    translated = [wildcards[part[0]] if part[:1] in wildcards else pl.escape_regex(part) for part in parts if part]
    return f"(?s)^{''.join(translated)}$"
