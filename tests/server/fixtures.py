"""Fixtures of the server and robustness suites: the real program, started once a suite on a free port."""

from collections.abc import Iterator

import openai
import pytest
from harness import BINARY, MODEL, Server, running


@pytest.fixture(scope="session", autouse=True)
def ground() -> None:
    assert BINARY.exists(), f"{BINARY} is not built; run: make build"
    assert MODEL.exists(), f"{MODEL} is missing; run: make model"


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    with running() as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    """The session's server, idle: no test sees rows that another one left."""
    shared_server.wait_idle()
    return shared_server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client()
