"""The tools of MCP, called by the protocol's own client."""

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest
from mcp import Client, StdioServerParameters

from tests.helpers.builds import build_of, random_rows
from tests.serving.conftest import COMMAND, ROWS, K, Server
from whiten_index import open_index

TEXT = "a cat sat on the mat"


def talk(to: Any) -> tuple[list[str], Any, Any, Any]:
    async def ask() -> Any:
        async with Client(to) as client:
            tools = await client.list_tools()
            found = await client.call_tool("search", {"query": TEXT, "index": "docs", "top_k": 3})
            facts = await client.call_tool("describe_index", {"index": "docs"})
            wrong = await client.call_tool("search", {"query": TEXT, "index": "x"})
            return [tool.name for tool in tools.tools], found, facts, wrong

    return anyio.run(ask)


@pytest.mark.parametrize("transport", ["http", "stdio"])
def test_a_client_finds_documents(server: Server, index: Path, transport: str) -> None:
    stdio = StdioServerParameters(
        command=COMMAND[0],
        args=[*COMMAND[1:], f"docs={index}", "--stdio"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    names, found, facts, wrong = talk(server.url + "/mcp" if transport == "http" else stdio)
    assert names == ["search", "describe_index"]
    hits = found.structured_content["results"]
    wanted = open_index(index).search(TEXT, top_k=3)
    assert [hit["id"] for hit in hits] == [hit.id for hit in wanted]
    assert facts.structured_content["rows"] == ROWS
    assert facts.structured_content["k"] == K
    assert wrong.is_error
    assert "no index is served as 'x'" in wrong.content[0].text


@pytest.fixture(scope="module")
def of_embeddings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index whose server is soon there, as it has no model to load."""
    folder, rows = tmp_path_factory.mktemp("embeddings"), random_rows()
    table = pa.table({"id": range(len(rows)), "e": list(rows)})
    return build_of(table, folder, whiten="pca", k=4)


@pytest.mark.parametrize(
    # The input may be seen to end before the answer is written.
    ("end", "statuses"),
    [("SIGTERM", {0}), ("SIGINT", {0}), ("reader gone, input ended", {0, 141})],
)
def test_an_input_that_stays_open_keeps_no_server(
    of_embeddings: Path, end: str, statuses: set[int]
) -> None:
    def asked(method: str, **parameters: Any) -> bytes:
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": parameters}
        return json.dumps(request).encode() + b"\n"

    client = {"clientInfo": {"name": "a test", "version": "1"}, "capabilities": {}}
    with subprocess.Popen(
        [*COMMAND, f"docs={of_embeddings}", "--stdio"],
        bufsize=0,
        **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
    ) as process:
        process.stdin.write(asked("initialize", protocolVersion="2025-03-26", **client))
        assert b"whiten-index" in process.stdout.readline()
        if end.startswith("SIG"):
            process.send_signal(getattr(signal, end))
        else:
            process.stdout.close()
            process.stdin.write(asked("tools/list"))
            process.stdin.close()
        assert process.wait(60) in statuses
        assert process.stderr.read() == b""


@pytest.mark.parametrize("how", ["<&-", ">&-", ">/dev/full"])
def test_input_and_output_that_fail(of_embeddings: Path, how: str) -> None:
    """As the system's errors, in one line."""
    line = b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n'
    words = shlex.join([*COMMAND, f"docs={of_embeddings}", "--stdio"])
    done = subprocess.run(["bash", "-c", f"{words} {how}"], input=line, capture_output=True)
    assert done.returncode == 7
    assert re.fullmatch(b"Error: .*standard input or output.*\n", done.stderr)
