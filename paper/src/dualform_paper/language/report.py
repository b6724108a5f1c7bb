"""Tables 2 to 7 and what goes with them, as sections of a page: every number from answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from dualform.language.recorded import RecordedLanguageModel
from dualform.language.terminal import visible
from dualform.language.text import Text
from dualform.progress import Progress, ignore_progress
from dualform_paper.language.marking import escaped, marked
from dualform_paper.language.queries import PROMPT, chosen, papers
from dualform_paper.language.tables import BEST, KS, N_GRAM, OUTSIDE, TOP, WINDOW, Answer, Place, answered
from dualform_paper.section import Section, percent, table
from dualform_paper.summary import mean_std, written

CHOSEN, SHOWN = 20, 6
"""So many queries are chosen by the rule, and so many of them are shown in full."""


def ask(recorded: RecordedLanguageModel, *, count: int = CHOSEN, progress: Progress = ignore_progress) -> list[Answer]:
    """The paper's queries and those by the rule, put to a recording."""
    queries, answers = [*papers(recorded.text), *chosen(recorded.text, count)], list[Answer]()
    for number, query in enumerate(queries):
        progress("asking", number, len(queries))
        answers.append(answered(recorded, query))
    progress("asking", len(queries), len(queries))
    return answers


def sections(text: Text, answers: Sequence[Answer], *, dropout: float = 0.0) -> list[Section]:
    """The paper's tables, queries by the rule, and how far attention and a search by the letter agree. dropout: in training."""
    if not answers:
        return []
    ruled = [one for one in answers if one.asked.table is None]
    tables = [one for one in answers if one.theirs]
    found = [
        *([Section("The paper's passages in our ranking", _in_short(text, tables, dropout))] if tables else []),
        Section("How to read the tables", _guide(text.unit)),
        *(
            Section(f"Table {one.asked.table}: {one.asked.shared}", _answer(text, one), asdict(one))
            for one in answers
            if one.asked.table is not None
        ),
    ]
    if ruled:
        data = {"answers": [asdict(one) for one in ruled]}
        found.append(Section("Queries chosen by a rule", _ruled(text, ruled), data))
    found.append(Section("How far does a search by the letter agree?", _agreement(text, answers)))
    found.append(Section("Negative examples", _negatives(text, answers)))
    return found


def _in_short(text: Text, answers: Sequence[Answer], dropout: float) -> str:
    rows = []
    note = (
        f" With dropout {dropout:g} a key has a part of its {text.unit}'s embedding only, drawn anew at each visit: among positions of the "
        f"same {text.unit}, rank by the whole key is largely luck until there are many visits. The hidden state's part is not dropped out: "
        f"see the last column."
        if dropout
        else ""
    )
    for one in answers:
        words = f"… {escaped(one.asked.before[-24:])}<b>{escaped(visible(one.asked.token))}</b>"
        ours, lexical, state = (
            ", ".join(_number(getattr(p, key)) for p in one.theirs) for key in ("rank", "lexical_rank", "state_rank")
        )
        rows.append((f"Table {one.asked.table}", words, ours, lexical, f"{state} of {one.same:,}"))
    ranks = sorted(place.rank for one in answers for place in one.theirs)
    among = sum(rank <= TOP for rank in ranks)
    return (
        f"The passages that the paper shows are in our training text. These are the ranks that the same positions have among our "
        f"{len(text.train):,}, by attention and by BM25; and, among the positions where the {text.unit} that asks stands, by the part of the "
        f"attention that comes from the hidden state:\n\n"
        + table(("", "query", "ranks by attention", "ranks by BM25", f"same {text.unit}, by the state"), rows, 2)
        + f"\n\n{among} of the {len(ranks)} are among the {TOP} best of our model, {sum(rank <= 100 for rank in ranks)} among the 100 best; the median rank "
        f"is {ranks[len(ranks) // 2]:,}.{note}"
    )


def _guide(unit: str) -> str:
    terms = "words" if N_GRAM[unit] == 1 else f"stretches of {N_GRAM[unit]} characters"
    return (
        f"The prompt is fed to the trained model; its last {unit} asks (in bold). *Attention* is key · query in the mean over a position's "
        f"visits. (The paper sums over visits; with equally many the ranking is the same, else a sum puts those first that the last epoch has "
        f"visited once more.) The {TOP} best positions are shown of which no two are closer than {WINDOW[unit]} {unit}s. *Rank* is among all "
        f"positions, by attention; beside it the rank by BM25 (Lucene's form) of the {WINDOW[unit]} {unit}s up to the position with those up to "
        f"the query, whose terms are {terms}; *in common* is how many {unit}s up to the position are the prompt's last ones; *by the state* is the rank among the positions where the "
        f"{unit} that asks stands, by the hidden state's part of the attention alone. The paper's passages "
        f"are looked up in our training text, and stand here with their rank in our model. The *negative* one is the best match by BM25 that is not "
        f"near any of the {OUTSIDE:,} most attended positions. A prompt has {PROMPT[unit]} {unit}s, or what the paper shows if that is more.\n\nThe text of "
        f"the paper that we have shows the highlighted tokens of Tables 3 and 4 only. There it is the last one that the query and its passages have "
        f"in common, and so it was taken in the others."
        + (
            " Table 6's caption speaks of “principal”, which was asked first: its passages have other words there, and are then far behind."
            if unit == "word"
            else ""
        )
    )


def _answer(text: Text, one: Answer) -> str:
    asked, unit = one.asked, text.unit
    where = f"{asked.part} text, {unit} {asked.position:,}" + (f", *{escaped(asked.title)}*" if asked.title else "")
    likely = ", ".join(f"<b>{escaped(visible(token))}</b> {percent(p)}" for token, p in one.likely)
    rows = [
        *(_row(f"attention {n}", place) for n, place in enumerate(one.top, 1)),
        *(_row(f"paper {n}", place) for n, place in enumerate(one.theirs, 1)),
        *(_row(f"BM25 {n}", place) for n, place in enumerate(one.lexical, 1)),
        *([_row("negative", one.negative)] if one.negative else []),
    ]
    own = ""
    if one.own:
        own = (
            f" The query is of the training text: it and its surroundings are left out; its own position has rank {one.own.rank:,} of "
            f"{len(text.train):,}, visited {one.own.visits} times."
        )
    bm25, ending = (one.agreement[name] for name in ("BM25", "common ending"))
    k = KS[1]
    return (
        f"> {marked(asked.before, asked.token, asked.after)}\n\n({where}.) The model goes on with {likely}.{own}\n\n"
        + table(("", "training text", "attention", "rank", "rank by BM25", "in common", "by the state"), rows, 2)
        + f"\n\nOf the {k} best passages {percent(bm25.overlap[k])} are among BM25's and {percent(ending.overlap[k])} among those with the longest "
        f"common ending; rank correlation {bm25.correlation:.2f} and {ending.correlation:.2f}."
    )


def _row(name: str, place: Place) -> tuple[str, ...]:
    title = f" *({escaped(place.title)})*" if place.title else ""
    return (
        name,
        f"{marked(place.before, place.token, place.after)}{title}",
        f"{place.attention:.2f}",
        f"{place.rank:,}",
        f"{place.lexical_rank:,}",
        str(place.ending),
        _number(place.state_rank),
    )


def _number(rank: int | None) -> str:
    return "–" if rank is None else f"{rank:,}"


def _ruled(text: Text, answers: Sequence[Answer]) -> str:
    end = "that ends a word" if text.unit == "character" else "of letters"
    parts = [
        f"The test text is cut into {len(answers)} equal stretches; the query is the middle {text.unit} of each, or the next one {end}. The first "
        f"{min(SHOWN, len(answers))} in full; all of them count below."
    ]
    for one in answers[:SHOWN]:
        words = marked(one.asked.before[-40:], one.asked.token, one.asked.after[:20])
        parts.append(f"<details><summary>{words}</summary>\n\n{_answer(text, one)}\n\n</details>")
    return "\n\n".join(parts)


def _agreement(text: Text, answers: Sequence[Answer]) -> str:
    rows = []
    for name in ("BM25", "common ending"):
        mine = [one.agreement[name] for one in answers]
        cells = [written(mean_std([one.overlap[k] for one in mine]), 1, 100) for k in KS]
        rows.append((name, *cells, written(mean_std([one.correlation for one in mine]), 2)))
    count, unit = answers[0].agreement["BM25"].passages, text.unit
    rows.append(("chance", *(f"{min(100.0, 100 * k / count):.1f}" for k in KS), "0"))
    same, ending, goes_on = (
        mean_std([getattr(one.retrieved, key) for one in answers])[0] for key in ("same_token", "ending", "answer")
    )
    return (
        f"The training text in {count:,} passages of {WINDOW[unit]} {unit}s; a passage's score is the highest of its positions. Share (%) of the k passages "
        f"with the most attention that are among the k best of the search, and Spearman's rank correlation over all passages: mean ± deviation "
        f"over {len(answers)} queries.\n\n"
        + table(("", *(f"k = {k:,}" for k in KS), "correlation"), rows)
        + f"\n\nAt the {BEST} positions with the most attention the {unit} that asks stands in {percent(same)} of the cases; in the mean "
        f"{ending:.1f} {unit}s up to there are the prompt's last ones; {percent(goes_on)} of them go on as the model does."
    )


def _negatives(text: Text, answers: Sequence[Answer]) -> str:
    known = [(one.asked, one.negative) for one in answers if one.negative]
    if not known:
        return f"No match by BM25 is outside the surroundings of the {OUTSIDE:,} most attended positions."
    ranks, places = (sorted(getattr(one, key) for _, one in known) for key in ("rank", "lexical_rank"))
    unlike = sum(one.token != asked.token for asked, one in known)
    return (
        f"The best match by BM25 that is not attended to, found by the rule above for {len(known)} of {len(answers)} queries. In the middle of these, it "
        f"has rank {places[len(places) // 2]:,} by BM25 and {ranks[len(ranks) // 2]:,} of {len(text.train):,} by attention. In {unlike} of them another "
        f"{text.unit} stands at its position: BM25 matches what is in a window, wherever; the query is made by the last {text.unit} and the state before it."
    )
