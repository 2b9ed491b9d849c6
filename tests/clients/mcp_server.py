"""An MCP server on its standard input and output, with one tool: it tells what test_agents.py looks for."""

import json
import sys

TOOL = {
    "name": "tell",
    "description": "foretold-by-definition",  # the word that lets the scripted model call it
    "inputSchema": {"type": "object", "properties": {"what": {"type": "string"}}},
}


def result_of(request):
    method = request["method"]
    if method == "initialize":
        version = request["params"]["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "oracle", "version": "1"}}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": sys.argv[1]}]}
    return {}


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result_of(request)}), flush=True)
