"""Tools of the Model Context Protocol: a language model searches the indexes by itself."""

from typing import TYPE_CHECKING, Any, NoReturn

import pydantic_core
from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import METHOD_NOT_FOUND

import whiten_index
from whiten_index.errors import WhitenIndexError
from whiten_index.serving.bodies import SearchBody
from whiten_index.serving.problems import told

if TYPE_CHECKING:
    from whiten_index.serving.service import Service


class _Server(MCPServer[Any]):
    async def get_prompt(self, *_: Any, **__: Any) -> NoReturn:
        # The library's own error, with the client's text, goes to the log with its traceback.
        raise MCPError(METHOD_NOT_FOUND, "there are no prompts")


def mcp_server(service: "Service") -> MCPServer[Any]:
    """Return a server with the tools ``search`` and ``describe_index``."""
    server = _Server(
        "whiten-index",
        version=whiten_index.__version__,
        instructions="Semantic search in these indexes of documents: " + ", ".join(service.indexes),
    )

    @server.tool()
    async def search(
        query: str, index: str | None = None, top_k: int = 5, filter: str | None = None
    ) -> dict[str, Any]:
        """Find the documents that answer a query.

        Args:
            query: a question or a description, in words.
            index: which index; may be left out if there is one.
            top_k: how many documents.
            filter: a condition on their columns, such as lang == 'en'; describe_index names them.
        """
        try:
            body = SearchBody(index=index, texts=query, top_k=top_k, filter=filter)
            found = await service.search(body)
        except (WhitenIndexError, ValueError) as error:
            raise ToolError(told(error)) from None
        plain: dict[str, Any] = pydantic_core.to_jsonable_python(
            {**found, "results": found["results"][0]["hits"]}, fallback=str, inf_nan_mode="null"
        )
        return plain

    @server.tool()
    async def describe_index(index: str | None = None) -> dict[str, Any]:
        """Say what an index holds: its rows, its columns, its version and its size."""
        try:
            return service.find(index).summary()
        except WhitenIndexError as error:
            raise ToolError(str(error)) from error

    return server
