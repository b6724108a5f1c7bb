"""The explorer's JSON endpoints (described at /openapi.json) and its page."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException as StarletteHTTPException

from dualform.errors import DualformError, QuestionError
from dualform.explorer import forms
from dualform.explorer.session import Session
from dualform.explorer.texts import Texts
from dualform.explorer.work import BusyError, Desk, Jobs
from dualform.progress import Progress
from dualform.version import __version__

T = TypeVar("T")
PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
         ".svg": "image/svg+xml"}  # fmt: skip
ANSWERS: dict[int | str, dict[str, Any]] = {
    400: {"model": forms.Problem, "description": "The question makes no sense as asked; `problem` says why."},
    401: {"model": forms.Problem, "description": "The token is missing: Authorization: Bearer …"},
    403: {"model": forms.Problem, "description": "Another web site has asked."},
    413: {"model": forms.Problem, "description": "The body is too long."},
    414: {"model": forms.Problem, "description": "The address is too long."},
    422: {"model": forms.Problem, "description": "A parameter is missing or not what it should be."},
    503: {"model": forms.Problem, "description": "Too many questions at once."},
}
SLOW: dict[int | str, dict[str, Any]] = {
    409: {"model": forms.Problem, "description": "This takes long: start it as a job, by POST /api/jobs."},
}
CONDITION = 1500
"""Characters of the longest condition; what of SQL it may have, query/conditions.py says."""
Input = Annotated[
    str,
    Query(
        max_length=1100, description='"test:7" for a test example, "draw:…" for a drawing of 1024 hexadecimal digits.'
    ),
]
Layer = Annotated[str, Query(max_length=300, description="The name of a recorded layer.")]
Drop = Annotated[
    str,
    Query(
        max_length=CONDITION,
        min_length=1,
        description='A condition on the rows\' columns and `step`, in SQL: "label = 7".',
    ),
]
Few = Annotated[int, Query(ge=1, le=60, description="How many.")]
Offset = Annotated[int, Query(ge=0, le=10_000_000)]

Typed = Annotated[str, Query(max_length=4000, description="What was typed.")]
Place = Annotated[int | None, Query(ge=0, le=100_000, description="The token that is asked about; default: the last.")]
JobName = Annotated[str, Field(max_length=40)]


class Work(BaseModel):
    """Long work to be done."""

    kind: Literal["verify", "totals", "edit", "influence", "suspects"]
    by: list[Annotated[str, Field(max_length=300)]] = Field(
        default=[], max_length=8, description="totals: the columns."
    )
    input: str = Field(default="", max_length=1100, description="edit, influence: the input.")
    target: int | None = Field(
        default=None, ge=0, le=10_000_000, description="influence: the output; default: the answer."
    )
    prompt: str = Field(default="", max_length=4000, description="influence, instead of an input: what was typed.")
    position: int | None = Field(default=None, ge=0, le=100_000, description="influence: the token; default: the last.")
    layer: str = Field(default="", max_length=300, description="influence on text: the layer.")
    drop: str = Field(default="", max_length=CONDITION, description="edit: the condition, in SQL.")


class SlowError(QuestionError):
    """A question that takes too long to wait for."""


def application(session: Session) -> FastAPI:
    """The application for one run, without its guard."""
    desk, jobs = Desk(), Jobs()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        desk.start(session.warm)
        yield
        jobs.close()
        desk.close()

    app = FastAPI(
        title="dualform explorer",
        version=__version__,
        description="Where the predictions of a recorded network come from.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=ANSWERS,
    )

    async def answer(request: Request, question: Callable[[], T]) -> T:
        found = await desk.ask(question, request.is_disconnected)
        if found is None:
            raise HTTPException(499, "nobody waits for this any more.")
        return found

    @app.get("/api/run")
    async def run(request: Request) -> forms.RunForm:
        """What was recorded, and what can be asked."""
        return await answer(request, session.run)

    @app.get("/api/log")
    async def log(request: Request) -> forms.Logged:
        """What log() was given, over the steps."""
        return await answer(request, session.log)

    @app.get("/api/rows")
    async def rows(request: Request, column: Annotated[str, Query(max_length=300)]) -> forms.Counted:
        """How many rows each value of a column has."""
        return await answer(request, lambda: session.rows(column))

    @app.get("/api/examples")
    async def examples(
        request: Request,
        label: Annotated[str, Query(max_length=300, description="Only of this class.")] = "",
        right: Annotated[bool | None, Query(description="Only with right, or only with wrong answers.")] = None,
        number: Annotated[
            int | None, Query(ge=0, le=10_000_000_000, description="Only this place in its test set.")
        ] = None,
        part: Annotated[str, Query(max_length=300, description="Only of this test set.")] = "",
        shuffle: Annotated[int | None, Query(ge=0, le=2**31, description="Shuffled with this seed.")] = None,
        offset: Offset = 0,
        limit: Few = 40,
    ) -> forms.Examples:
        """Test examples that fit."""
        return await answer(
            request,
            lambda: session.predictions.examples(
                label=label, right=right, number=number, part=part, shuffle=shuffle, offset=offset, limit=limit
            ),
        )

    @app.get("/api/prediction")
    async def prediction(request: Request, input: Input) -> forms.Prediction:
        """What the model says about an input."""
        return await answer(request, lambda: session.predictions.prediction(input))

    @app.get("/api/sources")
    async def sources(
        request: Request,
        input: Input,
        layer: Layer,
        kind: forms.Kind = "attention",
        target: Annotated[
            int | None, Query(ge=0, le=10_000_000, description="The output; default: the answer.")
        ] = None,
        absolute: Annotated[bool, Query(description="Sum sizes, as the paper's figures do (attention only).")] = False,
        k: Few = 8,
    ) -> forms.Sources:
        """Where an answer comes from, in one layer."""

        def found() -> forms.Sources:
            session.layer(layer)
            return session.scoring.sources(
                input, layer, kind, target=target, k=k, absolute=absolute, last=session.is_last(layer)
            )

        with session.scoring.announced(input, layer, kind):
            return await answer(request, found)

    def check_quick(drop: str) -> None:
        if not session.edits.is_quick(drop):
            raise SlowError("this edit takes long. Start it as a job: POST /api/jobs with kind, input and drop.")

    @app.get("/api/edit", responses=SLOW)
    async def edit(request: Request, input: Input, drop: Drop) -> forms.Change:
        """A prediction before and after some memory is dropped, if that is quick; otherwise it is a job."""

        def found() -> forms.Change:
            check_quick(drop)
            return session.edits.change(input, drop)

        return await answer(request, found)

    @app.get("/api/accuracy", responses=SLOW)
    async def accuracy(request: Request, drop: Drop) -> forms.Accuracy:
        """Right answers on the test set, before and after some memory is dropped; only for edits that are quick."""

        def found() -> forms.Accuracy:
            check_quick(drop)
            return session.edits.accuracy(drop)

        return await answer(request, found)

    @app.get("/api/sample")
    async def sample(
        request: Request,
        key: Annotated[
            list[Annotated[str, Field(max_length=300)]],
            Query(max_length=8, description="Its entries in the columns that name samples."),
        ],
        layer: Layer,
        k: Few = 12,
    ) -> forms.SampleForm:
        """A training example: what it wrote over time, and which test examples read it."""

        def found() -> forms.SampleForm:
            session.layer(layer)
            return session.reading.sample(key, layer, k=k)

        return await answer(request, found)

    @app.get("/api/suspects")
    async def suspects(request: Request, offset: Offset = 0, limit: Few = 40) -> forms.Suspects:
        """Training examples whose label is perhaps wrong, the most suspicious first."""
        return await answer(request, lambda: session.suspicion.suspects(offset=offset, limit=limit))

    def texts() -> Texts:
        if session.text is None:
            raise QuestionError("this run has no text.")
        return session.text

    @app.get("/api/text")
    async def text(request: Request, prompt: Typed, position: Place = None) -> forms.Prompt:
        """A prompt token by token, and what may follow one of them."""
        return await answer(request, lambda: texts().prompt(prompt, position))

    @app.get("/api/passages")
    async def passages(
        request: Request,
        prompt: Typed,
        layer: Layer,
        position: Place = None,
        kind: Literal["attention", "contribution"] = "attention",
        target: Annotated[
            int | None, Query(ge=0, le=10_000_000, description="The next token; default: the likeliest.")
        ] = None,
        gate: Annotated[
            Literal["i", "f", "g", "o", "r", "z", "n", "h"] | None, Query(description="Contributions through one gate.")
        ] = None,
        part: Annotated[
            Literal["both", "input", "recurrent"], Query(description="Of a recurrent layer's keys.")
        ] = "both",
        k: Few = 8,
    ) -> forms.Passages:
        """Where in the training text a layer reads at a token."""

        def found() -> forms.Passages:
            session.layer(layer)
            return texts().passages(prompt, position, layer, kind, target=target, gate=gate, part=part, k=k)

        return await answer(request, found)

    def influence(work: Work, progress: Progress) -> forms.Prepared | forms.Passages:
        if not work.prompt:
            answer = int(session.predictions.logits(work.input).argmax())
            return session.scoring.estimate([(work.input, answer if work.target is None else work.target)], progress)[0]
        session.layer(work.layer)
        return texts().influence(work.prompt, work.position, work.layer, target=work.target, progress=progress)

    @app.post("/api/jobs", status_code=202)
    async def start(work: Work) -> forms.JobForm:
        """Begin long work."""
        doing: dict[str, Callable[[Any], BaseModel]] = {
            "verify": session.verify,
            "totals": lambda progress: session.build_totals(work.by, progress),
            "edit": lambda progress: session.edits.change(work.input, work.drop, progress),
            "influence": lambda progress: influence(work, progress),
            "suspects": lambda progress: session.suspicion.suspects(offset=0, limit=40),
        }
        return jobs.start(work.kind, doing[work.kind]).form()

    @app.get("/api/jobs/{id}", responses={404: {"model": forms.Problem, "description": "There is no such job."}})
    async def job(id: JobName) -> forms.JobForm:
        """How far a job is."""
        found = jobs.get(id)
        if found is None:
            raise HTTPException(404, "there is no such job.")
        return found.form()

    @app.delete("/api/jobs/{id}", responses={404: {"model": forms.Problem, "description": "There is no such job."}})
    async def cancel(id: JobName) -> forms.JobForm:
        """Cancel a job."""
        found = jobs.cancel(id)
        if found is None:
            raise HTTPException(404, "there is no such job.")
        return found.form()

    _serve_page(app)
    _speak(app)
    return app


def _serve_page(app: FastAPI) -> None:
    """Our own files, each under its name: no path from a request is looked up on the disk."""

    def serve(address: str, path: Path) -> None:
        async def file() -> Response:
            return FileResponse(path, media_type=TYPES[path.suffix], headers={"cache-control": "no-cache"})

        app.add_api_route(address, file, methods=["GET"], include_in_schema=False)

    for path in sorted(PAGE.iterdir()):
        if path.suffix in TYPES:
            serve("/" if path.name == "index.html" else f"/page/{path.name}", path)
    serve("/page/plotly.js", plotly_script())


def plotly_script() -> Path:
    """Plotly's own script, as its Python package ships it."""
    return Path(str(resources.files("plotly"))) / "package_data" / "plotly.min.js"


def _speak(app: FastAPI) -> None:
    """Every problem in words."""

    def say(status: int, problem: str) -> JSONResponse:
        return JSONResponse({"problem": problem}, status)

    def add(kind: Any, handler: Callable[[Request, Any], Awaitable[Response]]) -> None:
        app.add_exception_handler(kind, handler)

    async def question(request: Request, error: DualformError) -> Response:
        return say(400, str(error))

    async def busy(request: Request, error: BusyError) -> Response:
        return JSONResponse({"problem": str(error)}, 503, {"retry-after": "2"})

    async def http(request: Request, error: HTTPException) -> Response:
        return JSONResponse({"problem": str(error.detail)}, error.status_code, error.headers)

    async def invalid(request: Request, error: RequestValidationError) -> Response:
        told = [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()]
        return say(422, "; ".join(told[:5])[:2000])

    async def unexpected(request: Request, error: Exception) -> Response:
        return say(500, f"something unexpected happened: {type(error).__name__}.")

    async def slow(request: Request, error: SlowError) -> Response:
        return say(409, str(error))

    add(DualformError, question)
    add(SlowError, slow)
    add(BusyError, busy)
    add(StarletteHTTPException, http)
    add(RequestValidationError, invalid)
    add(Exception, unexpected)
