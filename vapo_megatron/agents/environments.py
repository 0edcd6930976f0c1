"""Environments: an agent without HTTP of its own, stepped by the machinery that runs every other agent."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any


def is_environment(kind: type) -> bool:
    """Whether a class has the async methods reset(task) -> messages and step(message) -> messages, reward, done."""
    return all(inspect.iscoroutinefunction(getattr(kind, name, None)) for name in ("reset", "step"))


def run_environment(kind: type) -> Callable[[dict[str, Any], str, Any], Awaitable[dict[str, Any]]]:
    """An agent that plays an environment to its end. The episode's reward is the sum over its steps.

    A class attribute `tools` is sent with every request.
    """

    async def run(task: dict[str, Any], base_url: str, http_client: Any) -> dict[str, Any]:
        environment = kind()
        messages, total, done = list(await environment.reset(task)), 0.0, False
        while not done:
            body = {"messages": messages, "tools": getattr(environment, "tools", None)}
            answer = await http_client.post(f"{base_url}/chat/completions", json=body)
            answer.raise_for_status()
            message = answer.json()["choices"][0]["message"]
            new, reward, done = await environment.step(message)
            total += reward
            messages += [message, *new]
        return {"reward": total}

    return run
