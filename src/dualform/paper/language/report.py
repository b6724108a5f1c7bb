"""The page of a language experiment: reads like section 5.5 and appendix C of the paper, every number from results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dualform.paper.language.marking import marked
from dualform.paper.language.tables import BEST, KS, N_GRAM, OUTSIDE, TOP, WINDOW
from dualform.paper.section import percent, table
from dualform.paper.summary import mean_std, written

Answers = Sequence[dict[str, Any]]
TITLES = {
    "aesop": "Characters: Aesop's Fables (section 5.5, appendix C.2)",
    "wikitext-2": "Words: WikiText-2 (section 5.5, appendix C.3)",
}
PAPERS = {
    "aesop": "about 185 K characters, vocabulary 107, 5000 steps in the authors' code",
    "wikitext-2": "about 2 M words, vocabulary 33 K, 10,000 steps in the authors' code",
}


def page(found: dict[str, Any], command: str, others: Sequence[str] = ()) -> str:
    """The whole page, from what `results.json` has. others: further sections in Markdown."""
    unit = found["text"]["unit"]
    tables = [one for one in found["answers"] if one["asked"]["table"] is not None]
    ruled = [one for one in found["answers"] if one["asked"]["table"] is None]
    parts = [
        f"# {TITLES.get(found['text']['name'], found['text']['name'])}",
        _beginning(found, command),
        "![Loss while training and on the test text](figures/training.png)",
        _reading_guide(unit),
        *(_answer(one, unit, found, f"Table {one['asked']['table']}: {one['asked']['shared']}") for one in tables),
        *([_ruled(ruled, unit, found)] if ruled else []),
        _agreement(found["answers"], unit),
        _negatives(found["answers"], unit, found),
        *others,
    ]
    return "\n\n".join(parts) + "\n"


def _beginning(found: dict[str, Any], command: str) -> str:
    s, trained, text = found["settings"], found["trained"], found["text"]
    per = "bits a character" if text["unit"] == "character" else "perplexity"
    visits = f"{found['visits']['least']} to {found['visits']['most']}"
    told = f"{_loss(trained['losses'][-1][1], text['unit'])} in training at the end" if trained["losses"] else ""
    test = "" if trained["test"] is None else f", {_loss(trained['test'], text['unit'])} on the test text"
    extra = f", dropout {s['dropout']:g}" if s["dropout"] else ""
    extra += f", weight decay {s['weight_decay']:g}" if s["weight_decay"] else ""
    paper = f" The paper: {PAPERS[text['name']]}." if text["name"] in PAPERS else ""
    return (
        f"Made by `{command}`. {text['train']:,} {text['unit']}s of training text and {text['test']:,} of test text, vocabulary "
        f"{text['vocabulary']:,}. Embedding {s['embedding']}, one LSTM layer of {s['state']}; Adam, lr {s['lr']:g}, gradient norms clipped at "
        f"{s['clip']:g}{extra}; {s['batch']} stretches of {s['window']} {text['unit']}s a step, state carried from step to step (dropped with "
        f"probability {s['forget']:g}), seed {s['seed']}. **{trained['steps']:,} steps, {found['epochs']:.1f} epochs,** in "
        f"{trained['seconds'] / 60:.0f} min with recording (times depend on what else the machine does); {per}: {told}{test}.{paper}\n\n"
        f"Recorded is the LSTM's linear map, which makes all gates from the input and the previous hidden state: "
        f"{'every slot' if trained['keep'] == 'slots' else 'the sum of the keys of each training position'}, "
        f"{trained['nbytes'] / 1e9:.2f} GB. Each position was visited {visits} times."
    )


def _loss(nats: float, unit: str) -> str:
    return f"{nats / math.log(2):.2f}" if unit == "character" else f"{math.exp(nats):.0f}"


def _reading_guide(unit: str) -> str:
    terms = "words" if N_GRAM[unit] == 1 else f"stretches of {N_GRAM[unit]} characters"
    return (
        f"## How to read the tables\n\nThe prompt is fed to the trained model; its last token's query asks (in bold). *Attention* is key · query in "
        f"the mean over a position's visits. (The paper sums over visits; with equally many the ranking is the same, else a sum puts those first "
        f"that the last epoch has visited once more.) The {TOP} best positions are shown of which no two are closer than {WINDOW[unit]} {unit}s. "
        f"*Rank* is among all positions, by attention; beside it the rank by BM25 (Lucene's form) of the {WINDOW[unit]} {unit}s up to the position "
        f"with those up to the query, where the terms are {terms}; *in common* is how many {unit}s up to the position are the prompt's last ones. "
        f"The paper's passages are looked up in our training text, and stand here with their rank in our model. The *negative* one is the best "
        f"match by BM25 none of whose surroundings is among the {OUTSIDE:,} most attended positions."
    )


def _answer(one: dict[str, Any], unit: str, found: dict[str, Any], title: str, level: int = 2) -> str:
    asked = one["asked"]
    where = f"{asked['part']} text, {unit} {asked['position']:,}" + (f", *{_title(asked)}*" if asked["title"] else "")
    likely = ", ".join(f"{_token(token)} {percent(p)}" for token, p in one["likely"])
    rows = [
        *(_row(f"attention {n}", place) for n, place in enumerate(one["top"], 1)),
        *(_row(f"paper {n}", place) for n, place in enumerate(one["theirs"], 1)),
        *(_row(f"BM25 {n}", place) for n, place in enumerate(one["lexical"], 1)),
        *([_row("negative", one["negative"])] if one["negative"] else []),
    ]
    own = ""
    if one["own"]:
        own = (
            f" The query is of the training text: it and its surroundings are left out; its own position has rank {one['own']['rank']:,} of "
            f"{found['text']['train']:,}, visited {one['own']['visits']} times."
        )
    bm25, ending = (one["agreement"][name] for name in ("BM25", "common ending"))
    return (
        f"{'#' * level} {title}\n\n> {marked(asked['before'], asked['token'], asked['after'])}\n\n({where}.) The model goes on with {likely}.{own}\n\n"
        + table(("", "training text", "attention", "rank", "rank by BM25", "in common"), rows, 2)
        + f"\n\nOf the {KS[1]} best passages {percent(_at(bm25, KS[1]))} are among BM25's, {percent(_at(ending, KS[1]))} among those with the longest common "
        f"ending; rank correlation {bm25['correlation']:.2f} and {ending['correlation']:.2f}."
    )


def _row(name: str, place: dict[str, Any]) -> tuple[str, ...]:
    title = f" *({_title(place)})*" if place["title"] else ""
    return (
        name,
        f"{marked(place['before'], place['token'], place['after'])}{title}",
        f"{place['attention']:.2f}",
        f"{place['rank']:,}",
        f"{place['lexical_rank']:,}",
        str(place["ending"]),
    )


def _title(place: dict[str, Any]) -> str:
    return marked(place["title"], "", "").removeprefix("… ").removesuffix("<b></b> …")


def _token(token: str) -> str:
    return marked("", token, "").removeprefix("… ").removesuffix(" …")


def _ruled(answers: Answers, unit: str, found: dict[str, Any]) -> str:
    """Queries by the rule: the first ones in full, behind a summary."""
    end = "that ends a word" if unit == "character" else "made of letters"
    parts = [
        f"## Queries chosen by a rule\n\nThe test text is cut into {len(answers)} equal stretches; the query is the middle {unit} of each, or the next one "
        f"{end}. No query was left out."
    ]
    for number, one in enumerate(answers[: found["shown"]], 1):
        words = marked(one["asked"]["before"][-40:], one["asked"]["token"], "")
        body = _answer(one, unit, found, f"Query {number}", 3)
        parts.append(f"<details><summary>{words}</summary>\n\n{body}\n\n</details>")
    return "\n\n".join(parts)


def _agreement(answers: Answers, unit: str) -> str:
    rows = []
    for name in ("BM25", "common ending"):
        cells = [written(mean_std([_at(one["agreement"][name], k) for one in answers]), 1, 100) for k in KS]
        cells.append(written(mean_std([one["agreement"][name]["correlation"] for one in answers]), 2))
        rows.append((name, *cells))
    count = answers[0]["agreement"]["BM25"]["passages"]
    rows.append(("chance", *(f"{min(100.0, 100 * k / count):.1f}" for k in KS), "0"))
    same, ending, goes_on = (
        mean_std([one["retrieved"][key] for one in answers])[0] for key in ("same_token", "ending", "answer")
    )
    return (
        f"## How far does a search by the letter agree?\n\nThe training text in {count:,} passages of {WINDOW[unit]} {unit}s; a passage's score is the highest "
        f"of its positions. Share (%) of the k passages with the most attention that are among the k best of the search, and Spearman's rank "
        f"correlation over all passages: mean ± deviation over {len(answers)} queries.\n\n"
        + table(("", *(f"k = {k:,}" for k in KS), "correlation"), rows)
        + f"\n\nAt the {BEST} positions with the most attention the {unit} that asks stands in {percent(same)} of the cases; in the mean "
        f"{ending:.1f} {unit}s up to there are the prompt's last ones; {percent(goes_on)} of them go on as the model does."
    )


def _negatives(answers: Answers, unit: str, found: dict[str, Any]) -> str:
    known = [one for one in answers if one["negative"]]
    if not known:
        return f"## Negative examples\n\nNo match by BM25 is outside the surroundings of the {OUTSIDE:,} most attended positions."
    ranks = sorted(one["negative"]["rank"] for one in known)
    places = sorted(one["negative"]["lexical_rank"] for one in known)
    unlike = sum(one["negative"]["token"] != one["asked"]["token"] for one in known)
    return (
        f"## Negative examples\n\nThe best match by BM25 that is not attended to, found by the rule above for {len(known)} of {len(answers)} queries: in the "
        f"middle of these, it has rank {places[len(places) // 2]:,} by BM25 and {ranks[len(ranks) // 2]:,} of {found['text']['train']:,} by attention. In "
        f"{unlike} of them another {unit} stands at the end of the window: BM25 matches what is in a window, wherever; the LSTM's query is made by "
        f"the last {unit} and the state before it."
    )


def _at(found: dict[str, Any], k: int) -> float:
    """By k; JSON has words for keys."""
    overlap = found["overlap"]
    return float(overlap[k] if k in overlap else overlap[str(k)])
