"""The router against its own OpenAPI document: schemathesis makes requests from it and checks the answers."""

from __future__ import annotations

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.router.conftest import House

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}", "/health", "/ready", "/status"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
def test_every_route_keeps_to_its_document(house: House, path: str, mode: GenerationMode) -> None:
    """Without schemathesis' pytest plugin, which does not know this pytest."""
    document = schemathesis.openapi.from_url(f"{house.url}/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    (operation,) = [operation for operation in operations if operation.path == path]

    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def keeps(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS)

    try:
        keeps()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # a route that takes nothing cannot be asked wrongly


def test_the_document_describes_the_bodies(house: House) -> None:
    document = house.http.get("/openapi.json").json()
    for path, needed in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        jsonschema_rs.meta.validate(body)
        assert body["required"] == ["model", needed]
        assert set(body["properties"]["kvlift"]["properties"]) >= {"policy", "tier", "escalation", "rho", "lift"}


@pytest.mark.parametrize("fields", [{}, {"prompt": "a"}, {"stream": True}, {"kvlift": {"tier": "large"}}, {"n": None}])
def test_what_the_router_takes_is_what_the_document_says(house: House, fields: dict[str, object]) -> None:
    document = house.http.get("/openapi.json").json()
    path = "/v1/completions" if "prompt" in fields else "/v1/chat/completions"
    body = {
        "model": "kvlift",
        **({} if "prompt" in fields else {"messages": [{"role": "user", "content": "a"}]}),
        **fields,
    }
    schema_of = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema_rs.validate(schema_of, body)
    assert house.ask(**fields).status_code == 200
