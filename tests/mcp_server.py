"""A Model Context Protocol server on stdin and stdout that does as its calls say; its protocol is written by hand.

    python mcp_server.py FILE [how]

It appends its process id to FILE at each start. `how` it starts: `well`, `twice` (two tools of one name), `schema` (one
that is none), `remote` (one whose schema refers to another), `output` (one whose results have a schema), `empty` (no
tools), `late` (answers a list of tools never), `stays` (goes on when its stdin ends).
"""

import json
import os
import sys
import time


def write(line, file=sys.stdout):
    file.write(f"{line}\n")
    file.flush()


def tools(how):
    schema = {
        "type": "object",
        "properties": {"do": {"type": "string"}, "text": {"type": "string"}},
        "required": ["do"],
    }
    does = {"name": "does", "description": "does as told", "inputSchema": schema}
    bad = {"name": "bad", "inputSchema": {"type": "object", "properties": {"a": {"type": 7}}}}
    away = {"name": "away", "inputSchema": {"type": "object", "properties": {"a": {"$ref": "file:///a.json"}}}}
    output = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a|aa)+$"}}}
    other = {"name": "other", "inputSchema": schema}
    unusual = {"empty": [], "twice": [does, does], "schema": [does, bad], "remote": [does, away]}
    return {**unusual, "output": [{**does, "outputSchema": output}]}.get(how, [does, other])


def result(arguments):
    """What a call is answered; None for no answer."""
    do, text = arguments["do"], arguments.get("text", "")
    if do == "die":
        write("last words", sys.stderr)
        os._exit(3)
    if do == "once" and not os.path.exists(text):
        open(text, "w").close()
        os._exit(3)
    if do == "hang":
        return None
    if do == "stall":
        time.sleep(60)
    if do == "garbage":
        write("no json at all")
        return None
    if do == "noise":
        write("a line of a log")
    if do == "wrong":
        return {"result": {"content": "a text"}}
    if do in ("refuse", "fail"):
        return {"error": {"code": -32602 if do == "refuse" else -32603, "message": f"{do}d"}}
    content = [{"type": "text", "text": f"{do} {text}".strip()}]
    if do == "show":
        content += [
            {"type": "image", "data": "aGk=", "mimeType": "image/png"},
            {"type": "resource", "resource": {"uri": "file:///a", "text": "hidden"}},
            {"type": "resource_link", "uri": "file:///b", "name": "b"},
            {"type": "text", "text": "end"},
        ]
    structured = {"structuredContent": {"a": text}} if do == "structured" else {}
    return {"result": {"content": content if do != "nothing" else [], "isError": do == "err", **structured}}


def answered(request, how):
    method, given = request["method"], request.get("params", {})
    if method == "initialize":
        info = {"name": "does", "version": "1"}
        return {"result": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}}
    if method == "tools/list":
        return None if how == "late" else {"result": {"tools": tools(how)}}
    if method == "tools/call":
        return result(given["arguments"])
    return {"error": {"code": -32601, "message": "no such method"}}


def main(file, how="well"):
    with open(file, "a") as pids:
        pids.write(f"{os.getpid()}\n")
    for line in sys.stdin:
        request = json.loads(line)
        answer = answered(request, how) if "id" in request else None
        if answer is not None:
            write(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}))
    if how == "stays":
        time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
