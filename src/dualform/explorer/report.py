"""The report: the page with its answers in one file that opens without a server."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus, urlencode

from dualform.errors import DualformError, QuestionError
from dualform.explorer.app import PAGE, application, plotly_script
from dualform.explorer.session import Session
from dualform.progress import Progress

RIGHT, WRONG = 4, 4
"""So many test examples with right and with wrong answers are taken, if none are named."""
SHOWN = 40
"""So many examples the page asks for at a time."""


@dataclass(frozen=True)
class Written:
    """What was written."""

    examples: int
    """Test examples or prompts."""
    nbytes: int


def write(
    session: Session,
    out: Path,
    *,
    tests: Sequence[int] | None = None,
    prompts: Sequence[str] = (),
    progress: Progress | None = None,
) -> Written:
    """Ask everything that the page may ask about some test examples, and put page and answers into one file.

    Of a language model: what it may ask about the last token of some prompts; default: the one that the page begins with.
    """
    if not out.parent.is_dir():
        raise QuestionError(f"there is no folder {out.parent} to write the report into.")
    language = session.subject.language
    if language is not None:
        prompts = list(dict.fromkeys(prompts or [language.prompt]))
        answers = _text_answers(session, prompts, progress)
    elif prompts:
        raise QuestionError("this run has no text, so it takes no prompts.")
    else:
        numbers = _chosen(session) if tests is None else list(dict.fromkeys(tests))
        for number in numbers:
            session.subject.test.place(number)
        if not numbers:
            raise QuestionError("there are no test examples to report on.")
        answers = _answers(session, numbers, progress)
    content = _file(answers, session.subject.title)
    beside = out.with_name(out.name + ".part")
    beside.write_text(content, encoding="utf-8")
    beside.replace(out)
    return Written(len(prompts) if language is not None else len(numbers), out.stat().st_size)


def _chosen(session: Session) -> list[int]:
    """The first wrong answers and the first right ones."""
    predictions = session.predictions
    wrong = predictions.examples(right=False, limit=WRONG).examples
    right = predictions.examples(right=True, limit=RIGHT).examples
    return [int(example.input.removeprefix("test:")) for example in (*wrong, *right)]


def _ask_all(app: Any, addresses: Sequence[str], progress: Progress | None) -> dict[str, Any]:
    """By address, what an application answers."""

    async def ask() -> dict[str, Any]:
        answers = {}
        for done, address in enumerate(addresses):
            if progress is not None:
                progress("asking", done, len(addresses) + 1)
            answers[unquote_plus(address)] = await asked_of(app, address)
        return answers

    return asyncio.run(ask())


def _text_answers(session: Session, prompts: Sequence[str], progress: Progress | None) -> dict[str, Any]:
    """By address, what the server would answer about the last token of each prompt."""
    app = application(session)
    run = session.run()
    kinds = [view.kind for view in run.views if not view.missing and view.kind != "influence"]
    answers = _ask_all(app, _questions_about_run(session), progress)
    for prompt in prompts:
        asked = _ask_all(app, [_address("/api/text", prompt=prompt)], progress)
        [found] = asked.values()
        likeliest = found["following"][0]["unit"]
        addresses = []
        for layer in run.layers:
            about = {"prompt": prompt, "layer": layer.name}
            if not layer.attends:
                continue
            if "attention" in kinds:
                addresses.append(_address("/api/passages", kind="attention", **about))
            if "contribution" in kinds:
                addresses.append(_address("/api/passages", kind="contribution", target=likeliest, **about))
        answers |= asked | _ask_all(app, addresses, progress)
    answers["/api/run"]["text"] |= {"prompt": prompts[0], "prompts": list(prompts)}
    _missing(answers["/api/run"], "it is estimated when it is asked for: start the explorer")
    answers["/api/jobs/verify"] = {"result": _certificate(session, progress)}
    return answers


def _certificate(session: Session, progress: Progress | None) -> dict[str, Any] | None:
    if session.subject.info["keep"] == "keys":
        return None
    return session.verify(progress).model_dump(mode="json")


def _answers(session: Session, numbers: Sequence[int], progress: Progress | None) -> dict[str, Any]:
    """By address, what the server would answer."""
    app = application(session)
    answers = _ask_all(app, questions(session, numbers), progress)
    try:
        for asked in _influence(session, numbers, progress):
            answers |= _ask_all(app, asked, progress)
    except DualformError as error:
        _missing(answers["/api/run"], str(error))
    examples = [session.predictions.example(number).model_dump(mode="json") for number in numbers]
    some = {"found": len(examples), "offset": 0, "examples": examples}
    answers[_address("/api/examples", limit=SHOWN)] = some
    answers["/api/jobs/verify"] = {"result": _certificate(session, progress)}
    return answers


def _questions_about_run(session: Session) -> list[str]:
    columns = session.book.rows.columns[1:]
    return ["/api/run", "/api/log", *(_address("/api/rows", column=name) for name in columns)]


def questions(session: Session, numbers: Sequence[int]) -> list[str]:
    """Every address that the page asks for, of these test examples; api.js sorts its parameters, and so do we."""
    run = session.run()
    found = _questions_about_run(session)
    kinds = [view.kind for view in run.views if not view.missing and view.kind != "influence"]
    for number in numbers:
        name = f"test:{number}"
        found.append(_address("/api/prediction", input=name))
        units = _units(session, number, len(run.units))
        for layer in run.layers:
            for kind in kinds:
                if kind == "attention" and layer.attends:
                    found.append(_address("/api/sources", input=name, layer=layer.name, kind=kind))
                if kind == "contribution":
                    found += [
                        _address("/api/sources", input=name, layer=layer.name, kind=kind, target=u) for u in units
                    ]
        for group in run.groups:
            if run.keep in ("slots", "rows") or group.fast:
                drops = [_equal(group.column, value.value) for value in group.values]
                found += [
                    _address("/api/edit", input=name, drop=drop) for drop in drops if session.edits.is_quick(drop)
                ]
    return found


def _influence(session: Session, numbers: Sequence[int], progress: Progress | None) -> Iterator[list[str]]:
    """Estimate influence, some answers at a time; then the addresses that the page asks for, of those."""
    run = session.run()
    if any(view.kind == "influence" and view.missing for view in run.views):
        return
    pairs = [(f"test:{number}", unit) for number in numbers for unit in _units(session, number, len(run.units))]
    together = session.scoring.can_estimate
    for low in range(0, len(pairs), together):
        yield [
            _address("/api/sources", input=one.input, layer=layer, kind="influence", target=one.target)
            for one in session.scoring.estimate(pairs[low : low + together], progress)
            for layer in one.layers
        ]


def _missing(run: dict[str, Any], why: str) -> None:
    """Let the page say why there is no influence in the report."""
    for view in run["views"]:
        if view["kind"] == "influence":
            view["missing"] = why


def _units(session: Session, number: int, units: int) -> list[int]:
    """The outputs that are shown of a test example: the model's answer, and the label."""
    answer = int(session.predictions.answers[0][number])
    expected = session.predictions.expected[number]
    return sorted({answer, expected} if expected is not None and 0 <= expected < units else {answer})


def _equal(column: str, value: Any) -> str:
    """As edit.js writes it."""
    name = '"' + column.replace('"', '""') + '"'
    if value is None:
        return f"{name} IS NULL"
    if isinstance(value, bool):
        return f"{name} = {str(value).lower()}"
    return f"{name} = " + ("'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value))


def _address(path: str, **parameters: Any) -> str:
    return f"{path}?{urlencode(sorted(parameters.items()))}"


async def asked_of(app: Any, address: str) -> Any:
    """What an application answers, without a server in between."""
    path, _, query = address.partition("?")
    status, pieces = 0, []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(3600)  # nobody goes away
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        pieces.append(message.get("body", b""))

    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": query.encode(),
        "headers": [(b"host", b"localhost")], "http_version": "1.1", "scheme": "http", "root_path": "", "asgi": {"version": "3.0"},
    }  # fmt: skip
    await app(scope, receive, send)
    found = json.loads(b"".join(pieces))
    if status != 200:
        raise QuestionError(f"{address}: {found.get('problem', status)}")
    return found


def _file(answers: dict[str, Any], title: str) -> str:
    """Page, style, scripts and answers in one. Modules become data: addresses, named by an import map."""
    modules = {path.name: path.read_text() for path in PAGE.glob("*.js")}
    addresses = {f"dualform/{name}": _data("text/javascript", _named(text)) for name, text in modules.items()}
    icon = _data("image/svg+xml", (PAGE / "icon.svg").read_text())
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">',
        f"<title>{_escaped(title)}, a dualform report</title>",
        f'<link rel="icon" href="{icon}"><style>{(PAGE / "style.css").read_text()}</style>',
        f'<script type="application/json" id="answers">{_inside(json.dumps(answers))}</script>',
        f"<script>window.dualformIcon={json.dumps(icon)}</script>",
        f"<script>{_inside(plotly_script().read_text(encoding='utf-8'))}</script>",
        f'<script type="importmap">{_inside(json.dumps({"imports": addresses}))}</script>',
        '</head><body><a class="skip" href="#main">Skip to the content</a><header id="top"></header>',
        '<main id="main" tabindex="-1"></main><div id="status" role="status" aria-live="polite" class="hidden"></div>',
        '<script type="module">import "dualform/app.js";</script></body></html>',
    ]
    return "\n".join(parts)


def _named(text: str) -> str:
    """Modules import each other by name, as the import map knows them."""
    return re.sub(r'from "\./([a-z]+\.js)"', r'from "dualform/\1"', text)


def _data(kind: str, text: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def _inside(text: str) -> str:
    """Text that stands in a script element: it must not end it. < is the same in JSON and in JavaScript's strings."""
    return re.sub(r"<(?=/script|!--|script)", r"\\x3c" if text[:1] != "{" else r"\\u003c", text, flags=re.IGNORECASE)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
