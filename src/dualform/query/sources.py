"""The documents that a completion rests on, ranked, with their texts, in total and for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl
import torch

from dualform.query.answer import Sums, check_top
from dualform.query.completions import Completion

if TYPE_CHECKING:
    from rich.console import Group

TEXT = "text"
"""The column of a document's text."""
WIDTH = 100
"""How many characters of a document are printed."""


@dataclass(frozen=True)
class Sources:
    """The documents that a completion of a prompt rests on most."""

    prompt: str
    completion: list[str]
    """Its tokens."""
    log_probabilities: list[float]
    """Of each token, as the trained model has them."""
    method: str
    """ "influence" or "contribution": the name of the scores."""
    documents: int
    """How many documents were ranked."""
    frame: pl.DataFrame
    """The best documents, best first: `rank`, the columns that name a document, the score in total, and `text` if it is known."""
    tokens: pl.DataFrame
    """The same for each token of the completion: `rank`, the document, `place` and `token`, and the score for that token."""

    @property
    def texts(self) -> list[str | None]:
        """The texts of the documents, best first."""
        return self.frame[TEXT].to_list() if TEXT in self.frame.columns else [None] * self.frame.height

    @property
    def names(self) -> list[str]:
        """The columns that name a document."""
        return [name for name in self.frame.columns if name not in ("rank", self.method, TEXT)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "prompt": self.prompt,
            "completion": [
                {"token": token, "log_probability": number}
                for token, number in zip(self.completion, self.log_probabilities, strict=True)
            ],
            "method": self.method,
            "documents": self.documents,
            "sources": self.frame.to_dicts(),
            "tokens": self.tokens.to_dicts(),
        }

    def __repr__(self) -> str:
        lines = [self._title()]
        for row, text in zip(self.frame.to_dicts(), self.texts, strict=True):
            name = ", ".join(f"{column} {row[column]}" for column in self.names)
            lines.append(f"{row['rank']:>3}  {row[self.method]:+.3g}  {name}  {_line(text)}".rstrip())
        return "\n".join(lines)

    def _title(self) -> str:
        about = f"{self.method}, estimated" if self.method == "influence" else self.method
        probability = sum(self.log_probabilities)
        return (
            f"{_line(self.prompt)!r} → {''.join(self.completion)!r} (log-probability {probability:.2f}): "
            f"{self.frame.height} of {self.documents:,} documents by {about}"
        )

    def __rich__(self) -> Group:
        """Two tables: the documents, and which of them comes first for each token."""
        from rich.console import Group  # a terminal only

        return Group(self._document_table(), self._token_table())

    def _document_table(self) -> Any:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self._title()), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for column in ("", *self.names, self.method):
            table.add_column(column, justify="right")
        table.add_column("text", overflow="fold", ratio=1)
        for row, text in zip(self.frame.to_dicts(), self.texts, strict=True):
            names = [Text(str(row[column])) for column in self.names]
            table.add_row(str(row["rank"]), *names, f"{row[self.method]:+.3g}", Text(_line(text)))
        return table

    def _token_table(self) -> Any:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(title="Token by token", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        table.add_column("token")
        table.add_column("probability", justify="right")
        for rank in self.frame["rank"].to_list():
            table.add_column(f"#{rank}", justify="right")
        scores = self.tokens[self.method].to_numpy().reshape(self.frame.height, len(self.completion))
        for place, token in enumerate(self.completion):
            probability = torch.tensor(self.log_probabilities[place]).exp()
            cells = [f"{score:+.2g}" for score in scores[:, place]]
            table.add_row(Text(repr(token)), f"{probability:.1%}", *cells)
        return table


@dataclass(frozen=True)
class Texts:
    """Where the texts of documents are."""

    tables: Sequence[pl.DataFrame | None]
    """Tables that may have them, the first that has comes first: the samples of a run, and its rows."""
    given: Any = None
    """By what names a document, its text: a sequence, a mapping or a dataset."""

    def of(self, names: pl.DataFrame) -> pl.Series | None:
        """Return the texts of documents; None if they are not known."""
        if self.given is not None:
            return pl.Series(TEXT, [self._given(row) for row in names.iter_rows()], pl.String)
        by = names.columns
        for table in self.tables:
            if table is None or TEXT in by or table.schema.get(TEXT) != pl.String or not set(by) <= set(table.columns):
                continue
            if all(table.schema[name] == names.schema[name] for name in by):
                texts = table.join(names, on=by, how="semi").group_by(by).agg(pl.col(TEXT).first())
                return names.join(texts, on=by, how="left", maintain_order="left")[TEXT]
        return None

    def _given(self, row: tuple[Any, ...]) -> str | None:
        name = row[0] if len(row) == 1 else row
        try:
            found = self.given[name]
        except (IndexError, KeyError):
            return None
        if isinstance(found, Mapping):
            found = found.get(TEXT)
        return None if found is None else str(found)


def rank_documents(
    asked: Completion,
    method: str,
    sums: Sums,
    k: int,
    lowest: bool,
    texts: Texts,
) -> Sources:
    """Rank the groups of a total by the sum over all tokens. sums: a query for each token of the completion."""
    check_top(k, absolute=False, lowest=lowest)
    # Slots that serve all rows belong to no document; a condition may leave nothing of others
    is_named = ~sums.values.select(pl.all_horizontal(pl.all().is_null())).to_series().to_numpy()
    kept = is_named & (sums.visits > 0).numpy()
    values = sums.values.filter(kept)
    by_token = sums.totals[:, torch.from_numpy(kept)]
    total = by_token.sum(0)
    order = total.argsort(descending=not lowest, stable=True)[:k]
    names = values[order.numpy()]
    ranks = pl.Series("rank", range(1, len(order) + 1), pl.Int64)
    frame = pl.DataFrame([ranks, *names, pl.Series(method, total[order].numpy())])
    found = texts.of(names)
    if found is not None:
        frame = frame.with_columns(found.alias(TEXT))
    tokens = pl.DataFrame({"place": range(len(asked.tokens)), "token": asked.tokens})
    each = frame.select("rank", *names.columns).join(tokens, how="cross", maintain_order="left_right")
    scores = pl.Series(method, by_token[:, order].T.reshape(-1).numpy())
    return Sources(
        asked.prompt,
        asked.tokens,
        asked.log_probabilities,
        method,
        values.height,
        frame,
        each.with_columns(scores),
    )


def _line(text: str | None) -> str:
    """A text on one line, cut, without characters that would move the cursor or colour the terminal."""
    shown = " ".join((text or "").split())
    shown = "".join(letter if letter.isprintable() else "�" for letter in shown)
    return shown if len(shown) <= WIDTH else shown[: WIDTH - 1] + "…"
