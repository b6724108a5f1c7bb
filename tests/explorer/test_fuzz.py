"""The API against its own description, with whatever schemathesis thinks of: no answer is a 500, and all are as described."""

import pytest
import runs
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dualform.explorer.app import application
from dualform.explorer.runs import find
from dualform.explorer.session import Session
from dualform.explorer.subject import subject

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def digits(folder):
    return find(runs.digits(folder))


def letters(folder):
    dual, language = runs.letters(folder)
    return subject(dual, language=language)


@pytest.mark.parametrize("make", [digits, letters])
def test_no_answer_is_a_500(tmp_path, make):
    described = schemathesis.openapi.from_asgi("/openapi.json", application(Session(make(tmp_path / "run"))))
    operations = [found.ok() for found in described.get_all_operations()]
    assert len(operations) >= 12
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(max_examples=5, suppress_health_check=list(HealthCheck))
        def check(case):
            case.call_and_validate(checks=CHECKS)

        check()
