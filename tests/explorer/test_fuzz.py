"""The API against its own description, with whatever schemathesis thinks of: no answer is a 500, and all are as described."""

import pytest
import runs
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

import hostile
from dualform.explorer.app import application
from dualform.explorer.guard import Guard
from dualform.explorer.runs import find
from dualform.explorer.session import Session
from dualform.explorer.subject import subject

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
TOKEN = "open-sesame"
KNOWN = {"authorization": f"Bearer {TOKEN}"}


def digits(folder):
    return find(runs.digits(folder))


def letters(folder):
    dual, language = runs.letters(folder)
    return subject(dual, language=language)


def described(folder, make):
    """The page as it is served, behind its guard."""
    guarded = Guard(application(Session(make(folder))), hosts=["localhost", "testserver"], token=TOKEN)
    return schemathesis.openapi.from_asgi("/openapi.json", guarded, headers=KNOWN)


def call(case):
    """The status of an answer that is as described."""
    return case.call_and_validate(checks=CHECKS, headers=KNOWN).status_code


@pytest.mark.parametrize("make", [digits, letters])
def test_no_answer_is_a_500(tmp_path, make):
    operations = [found.ok() for found in described(tmp_path / "run", make).get_all_operations()]
    assert len(operations) >= 12
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(max_examples=5, suppress_health_check=list(HealthCheck))
        def check(case):
            assert call(case) != 401

        check()


def test_no_condition_gives_a_500(tmp_path):
    """Hostile conditions, and whatever hypothesis thinks of, at each place that takes one."""
    api = described(tmp_path / "run", digits)
    conditions = [text for text in hostile.conditions(tmp_path / "none.csv") if "\ud800" not in text]

    @given(drop=st.sampled_from(conditions) | st.text(st.characters(codec="utf-8"), max_size=100))
    @settings(max_examples=100, suppress_health_check=list(HealthCheck))
    def check(drop):
        work = {"kind": "edit", "input": "test:3", "drop": drop}
        cases = [
            api["/api/edit"]["GET"].Case(query={"input": "test:3", "drop": drop}),
            api["/api/accuracy"]["GET"].Case(query={"drop": drop}),
            api["/api/jobs"]["POST"].Case(body=work, media_type="application/json"),
        ]
        for case in cases:
            assert call(case) in (200, 202, 400, 422, 503)

    check()
