"""Requests made from the OpenAPI document: none is answered by an error of the server."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.serving.conftest import Server

REQUESTS = 2000


@pytest.mark.slow
def test_no_generated_request_is_a_server_error(server: Server) -> None:
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 8
    statuses = dict[int, int]()
    for operation in operations:

        @settings(
            max_examples=REQUESTS // len(operations) + 1,
            deadline=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            answer = case.call(base_url=server.url)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)

        ask()
    print(statuses)
    assert sum(statuses.values()) >= REQUESTS / 2
