"""An MCP server over a store: `ragcache mcp` over standard input and output, /mcp of `ragcache serve` over HTTP."""
