"""Search over HTTP and MCP: published indexes behind one server, and a page to look at them."""
