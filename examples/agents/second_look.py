"""An agent that looks at its answer a second time: `rollout.agent: second_look:run` from this
folder."""

from typing import Any

AGAIN = "Check your answer. Then give it once more."


async def run(task: dict[str, Any], base_url: str, http_client: Any) -> None:
    """Two turns; the verifier grades the second one."""
    messages = list(task["messages"])
    for request in (None, AGAIN):
        messages += [{"role": "user", "content": request}] if request else []
        answer = await http_client.post(f"{base_url}/chat/completions", json={"messages": messages})
        answer.raise_for_status()
        messages.append(answer.json()["choices"][0]["message"])
