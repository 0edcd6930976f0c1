"""An agent with two tools, Python and search: `rollout.agent: calculator:run` from this folder."""

import json
from typing import Any

from vapo_megatron.agents.tools import Search, run_python

FACTS = Search(["A gross is 144 pieces.", "A score is 20 years.", "A fathom is 6 feet."])


def tool(name: str, argument: str, what: str) -> dict[str, Any]:
    """A tool of one text argument, as OpenAI's protocol describes it."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string"}},
        "required": [argument],
    }
    return {
        "type": "function",
        "function": {"name": name, "description": what, "parameters": parameters},
    }


TOOLS = [
    tool("python", "code", "Run Python, see what it prints."),
    tool("search", "query", "Look up facts."),
]


async def run(task: dict[str, Any], base_url: str, http_client: Any) -> dict[str, Any]:
    """Let the policy call tools until it answers; the verifier grades its last message."""
    messages, errors = list(task["messages"]), 0
    while True:
        body = {"messages": messages, "tools": TOOLS}
        answer = await http_client.post(f"{base_url}/chat/completions", json=body)
        answer.raise_for_status()
        message = answer.json()["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return {"tool_errors": errors}
        for call in message["tool_calls"]:
            result, well = await call_tool(call["function"]["name"], call["function"]["arguments"])
            errors += not well
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


async def call_tool(name: str, arguments: str) -> tuple[str, bool]:
    """What a tool answers, and whether the call was good."""
    try:
        given = json.loads(arguments)
        if name == "python":
            return await run_python(str(given["code"]), seconds=5.0)
        if name == "search":
            return "\n".join(FACTS.find(str(given["query"]))) or "nothing found", True
    except (ValueError, KeyError, TypeError) as error:
        return f"bad arguments: {error}", False
    return f"no tool {name}", False
