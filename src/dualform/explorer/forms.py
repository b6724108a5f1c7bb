"""What the explorer answers: every answer's form, which is also its description in OpenAPI."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Value = int | float | str | bool | None
"""An entry of a column."""
Kind = Literal["attention", "contribution", "influence"]


class Form(BaseModel):
    """The root of all answers."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="null")


class Shown(Form):
    """A sample as it is shown: a picture (PNG in a data: address), a text, or numbers."""

    kind: Literal["image", "text", "vector", "none"]
    source: str = ""
    width: int = 0
    height: int = 0
    ink: bool = False
    text: str = ""
    numbers: list[float] = []


class Named(Form):
    """A class or a group: its value in the column, its name, and its place in the row of colours."""

    value: Value
    name: str
    colour: int


class LayerInfo(Form):
    """A recorded layer."""

    name: str
    kind: str
    d_in: int
    d_out: int
    slots: int
    attends: bool
    last: bool
    """Whether its output is the model's: contributions are then exact."""
    gates: list[str] = []
    """For recurrent layers: what can be asked for one by one."""


class View(Form):
    """A way to look at a prediction."""

    kind: Kind
    name: str
    sentence: str
    missing: str = ""
    """Why this run cannot show it."""


class Grouped(Form):
    """A column that memory can be edited by."""

    column: str
    values: list[Named]
    fast: bool
    """Whether group deltas were kept: an edit then needs no scan."""


class TextAbility(Form):
    """What can be done with text."""

    prompt: str
    """To begin with."""
    prompts: list[str] = []
    """Those that a report has answers for."""
    longest: int


class Colours(Form):
    """Those of the figures."""

    classes: list[str]
    series: list[str]


class RunForm(Form):
    """A run: what was recorded, and what can be asked."""

    title: str
    version: str
    steps: int
    rows: int
    bytes: int
    keep: str
    dtype: str
    ended: str
    columns: dict[str, str]
    layers: list[LayerInfo]
    left_out: dict[str, str]
    inexact: dict[str, str]
    totals: list[str]
    label: str
    by: list[str]
    units: list[Named]
    """The model's outputs, if it is a classifier."""
    groups: list[Grouped]
    tests: int
    samples: int
    parts: list[str]
    """Names of the test sets, if there are several."""
    accuracy: float | None
    views: list[View]
    draws: bool
    suspects: str
    """Empty, or why there is no list of suspects."""
    edits: str = ""
    """Empty, or why memory cannot be edited."""
    collected: str = ""
    """Empty, or that the model was trained already and its slots were collected at checkpoints."""
    text: TextAbility | None = None
    inputs: Literal["image", "text", "vector", "none"] = "none"
    colours: Colours


class Series(Form):
    """One logged number over the steps: at most so many points, each the mean of its stretch."""

    name: str
    steps: list[float]
    values: list[float | None]


class Logged(Form):
    """What log() was given."""

    series: list[Series]


class Count(Form):
    """How many rows a group has."""

    value: Value
    name: str
    colour: int
    rows: int


class Counted(Form):
    """Rows by a column, the largest groups first where there are too many."""

    column: str
    groups: int
    counts: list[Count]


class Example(Form):
    """A test example."""

    input: str
    """How to ask for it."""
    title: str
    shown: Shown
    label: Named | None
    answer: Named | None
    right: bool | None
    probability: float | None = None


class Examples(Form):
    """Some of the test examples that fit."""

    found: int
    offset: int
    examples: list[Example]


class Unit(Form):
    """One of the model's outputs."""

    unit: int
    name: str
    colour: int
    logit: float | None
    probability: float | None


class Prediction(Form):
    """What the model says about an input."""

    input: str
    title: str
    shown: Shown
    label: Named | None
    answer: int
    units: list[Unit]
    """The most probable first."""


class Excerpt(Form):
    """A stretch of training text around a token."""

    before: str
    token: str
    after: str
    title: str = ""
    position: int


class Source(Form):
    """A training example that an answer rests on."""

    key: list[Value]
    title: str
    shown: Shown
    label: Named | None
    weight: float
    """Summed over its visits."""
    step: int
    """Of its strongest visit."""
    visits: int


class Total(Form):
    """What a class adds up to."""

    value: Value
    name: str
    colour: int
    total: float


class Parts(Form):
    """Initial part + slots + remainder = target."""

    initial: float
    name: str = "initial part"
    """What the initial part is called."""
    slots: float
    remainder: float
    target: float


class Curve(Form):
    """The best slots of each class in falling order."""

    name: str
    colour: int
    values: list[float]


class Timeline(Form):
    """What was written when: sums over stretches of steps."""

    steps: list[float]
    positive: list[float]
    negative: list[float]
    cumulative: list[float]


class Sources(Form):
    """Where an answer comes from, in one layer."""

    layer: str
    kind: Kind
    target: int | None
    sentence: str
    exact: bool
    highest: list[Source]
    lowest: list[Source]
    totals: list[Total]
    grouped_by: str
    parts: Parts | None
    ranks: list[int]
    curves: list[Curve]
    time: Timeline | None


class Prepared(Form):
    """Influence was estimated: the sources of these layers can be asked for."""

    input: str
    target: int
    layers: list[str]


class Change(Form):
    """A prediction before and after an edit of memory."""

    drop: str
    fast: bool
    dropped_rows: int
    rows: int
    before: Prediction
    after: Prediction
    seconds: float
    sentence: str


class ClassAccuracy(Form):
    """How many test examples of a class are answered right."""

    value: Value
    name: str
    colour: int
    examples: int
    before: float
    after: float


class Accuracy(Form):
    """Right answers before and after an edit of memory."""

    examples: int
    of: int
    before: float
    after: float
    classes: list[ClassAccuracy]


class Visit(Form):
    """What a training example wrote in one step."""

    step: int
    key: float
    """The length of its key."""
    value: float | None
    """The length of its value."""
    values: list[float]
    """The value itself, if the layer has few outputs."""


class Reader(Form):
    """A test example that attends to a training example."""

    example: Example
    weight: float
    contribution: float | None


class SampleForm(Form):
    """A training example: what it wrote, and who reads it."""

    key: list[Value]
    title: str
    shown: Shown
    label: Named | None
    columns: dict[str, Value]
    layer: str
    visits: list[Visit]
    units: list[Named]
    problem: str
    """Why there are no values, if there are none."""
    readers: list[Reader]
    read_among: int
    suspicion: float | None
    suspicion_rank: int | None
    suspected: int


class Suspect(Form):
    """A training example whose label is perhaps wrong."""

    rank: int
    key: list[Value]
    title: str
    shown: Shown
    label: Named | None
    said: Named | None
    """What the model said instead, on average over its visits."""
    probability: float | None
    """The model's probability of its label, on average over its visits."""
    score: float
    visits: int


class Suspects(Form):
    """The most suspicious first."""

    of: int
    suspects: list[Suspect]


class Line(Form):
    """A parameter's certificate."""

    parameter: str
    gap: float | None
    floor: float | None
    movement: float | None
    verdict: str
    words: str


class Verified(Form):
    """Is each parameter what its slots say it is?"""

    passed: bool
    step: int
    compared_with: str
    lines: list[Line]


class Token(Form):
    """A token of a prompt, and what the model expected there."""

    position: int
    text: str
    probability: float | None
    """What the model gave this token before it was there."""


class Next(Form):
    """A token that may follow."""

    unit: int
    text: str
    probability: float
    prompt: str
    """The prompt up to the chosen token, with this one after it."""


class Prompt(Form):
    """A prompt, token by token, and what may follow the chosen one."""

    tokens: list[Token]
    position: int
    following: list[Next]


class Passage(Form):
    """A place in the training text."""

    excerpt: Excerpt
    weight: float
    visits: int
    """So many visits the weight sums."""


class Passages(Form):
    """Where in the training text a layer reads at a token."""

    layer: str
    kind: Kind
    sentence: str
    token: str
    towards: str
    """The next token that contributions are for."""
    highest: list[Passage]
    lowest: list[Passage]


class JobForm(Form):
    """Long work: how far it is, and what it found."""

    id: str
    kind: str
    state: Literal["waiting", "running", "done", "failed", "cancelled"]
    what: str
    done: int
    total: int
    problem: str
    result: Any = None


class Problem(Form):
    """What went wrong, in words."""

    problem: str
