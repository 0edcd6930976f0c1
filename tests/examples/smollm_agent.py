"""An agent that lets SmolLM2 use a calculator: `rollout.agent: smollm_agent:run`."""

import operator
import re
from typing import Any

CALL = re.compile(r"(\d+) *([-+*]) *(\d+)")
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


async def run(task: dict[str, Any], base_url: str, http_client: Any) -> dict[str, Any]:
    """One turn that writes a calculation, one that reads what the calculator says. The reward is a
    length's, so that every group has a signal."""
    messages = list(task["messages"])
    written = await _turn(messages, base_url, http_client)
    call = CALL.search(written)
    said = "The calculator was not asked."
    if call is not None:
        said = f"The calculator says {OPERATIONS[call[2]](int(call[1]), int(call[3]))}."
    messages.append({"role": "user", "content": said})
    written += await _turn(messages, base_url, http_client)
    return {"reward": (len(written) % 17) / 16, "tool_errors": int(call is None)}


async def _turn(messages: list[dict[str, str]], base_url: str, http_client: Any) -> str:
    """The policy's next message, which is appended."""
    answer = await http_client.post(f"{base_url}/chat/completions", json={"messages": messages})
    answer.raise_for_status()
    content: str = answer.json()["choices"][0]["message"]["content"] or ""
    messages.append({"role": "assistant", "content": content})
    return content
