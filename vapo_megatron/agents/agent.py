"""The user's agent: loaded by its name, checked, an environment played by one, its answer read."""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from numbers import Real
from pathlib import Path
from typing import Any

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.config.verifiers import LARGEST_REWARD
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import BadInput, reason_of


def run_environment(kind: type) -> Callable[[dict[str, Any], str, Any], Awaitable[dict[str, Any]]]:
    """An agent that plays an environment to its end: a class with the async methods reset(task) ->
    messages and step(message) -> messages, reward, done. A step's reward belongs to its turn; if
    the last one is None, the verifier grades the last message.

    A class attribute `tools` is sent with every request.
    """

    async def run(task: dict[str, Any], base_url: str, http_client: Any) -> dict[str, Any]:
        environment = kind()
        messages = list(await environment.reset(task))
        rewards = []
        done = False
        while not done:
            body = {"messages": messages, "tools": getattr(environment, "tools", None)}
            answer = await http_client.post(f"{base_url}/chat/completions", json=body)
            # A limit, or the endpoint knows why the episode broke
            if answer.status_code != HTTPStatus.OK:
                break
            message = answer.json()["choices"][0]["message"]
            new, reward, done = await environment.step(message)
            rewards.append(reward)
            messages += [message, *new]
        graded = {"reward": 0.0} if rewards and rewards[-1] is not None else {}
        return {"turn_rewards": [reward or 0.0 for reward in rewards]} | graded

    run.tools = getattr(kind, "tools", None)  # type: ignore[attr-defined]  # for check_agent()
    return run


def run_verifiers_environment(
    name: str,
) -> Callable[[dict[str, Any], str, Any], Awaitable[dict[str, Any]]]:
    """An agent that plays an environment of the library verifiers (the extra `verifiers`), by the
    name of its module: its rollout against our endpoint, and the reward of its rubric.

    It gets a row's `prompt` (or else the messages that a run without an agent sends), `answer`,
    `task` and `info`.

    Raises:
        ImportError, ValueError, RuntimeError: verifiers is not installed, or it cannot load the
            environment.
    """
    import verifiers
    from openai import AsyncOpenAI

    environment = verifiers.load_environment(name)

    async def run(task: dict[str, Any], base_url: str, http_client: Any) -> dict[str, Any]:
        client = AsyncOpenAI(
            base_url=base_url, api_key="none", http_client=http_client, max_retries=0
        )
        row = {
            "prompt": task.get("prompt") or task["messages"],
            "answer": task["answer"],
            "example_id": 0,
        }
        row |= {"task": task.get("task") or name, "info": task.get("info") or {}}
        state = await environment.rollout(row, client, "policy", {})
        if (error := state.get("error")) is not None:
            raise RuntimeError(f"{name}: {reason_of(error.__cause__ or error)}")
        await environment.rubric.score_rollout(state, score_sem=contextlib.nullcontext())
        return {"reward": float(state["reward"])}

    return run


KEY = "rollout.agent"
Agent = Callable[[dict[str, Any], str, Any], Awaitable[Any]]


def load_agent(path: str) -> Agent:
    """The async function at package.module:name, or one that plays the environment class there, or
    the environment verifiers:NAME.

    Raises:
        BadInput: it cannot be imported, is not async, or is an environment without a method that is
            needed.
    """
    module, _, name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        if module == "verifiers":
            return run_verifiers_environment(name)
        agent: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything on import
        remedy = (
            "give package.module:name, or verifiers:NAME with the extra and the environment's "
            "package installed"
        )
        raise BadInput(f"{KEY}={path}: cannot be imported ({reason_of(error)}): {remedy}") from None
    if inspect.isclass(agent):
        if not all(
            inspect.iscoroutinefunction(getattr(agent, method, None))
            for method in ("reset", "step")
        ):
            raise BadInput(
                f"{KEY}={path}: a class without the async methods reset and step: add them"
            )
        needed = [
            name
            for name, parameter in inspect.signature(agent).parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if needed:
            raise BadInput(
                f"{KEY}={path}: its class is made without arguments and asks for "
                f"{', '.join(needed)}: give them defaults"
            )
        return run_environment(agent)
    if not inspect.iscoroutinefunction(agent):
        raise BadInput(
            f"{KEY}={path}: not an async function: write `async def {name}(task, base_url, "
            "http_client)`"
        )
    if len(inspect.signature(agent).parameters) != 3:
        raise BadInput(f"{KEY}={path}: expected the three parameters task, base_url, http_client")
    function: Agent = agent
    return function


def check_agent(config: RolloutConfig, tokenizer: TextTokenizer) -> None:
    """Raises BadInput if there is an agent that cannot be run, or one with tools that the chat
    template ignores."""
    if config.agent is None:
        return
    sends_tools = bool(getattr(load_agent(config.agent), "tools", None))
    parser = config.episode.tool_parser
    if (sends_tools or parser is not None) and not tokenizer.reads_tools:
        key = (
            f"{KEY}={config.agent} sends tools"
            if sends_tools
            else f"rollout.episode.tool_parser={parser}"
        )
        raise BadInput(
            f"{key}, and the chat template of {tokenizer.directory} ignores tools: use a model "
            "whose template shows them, or put them into the messages and leave tools and "
            "tool_parser out"
        )


_ANSWER_KEYS = ("reward", "turn_rewards", "tool_errors", "correct")


def checked_answer(answer: Any, turns: int) -> dict[str, Any]:
    """The agent's return value as a dict; empty if the verifier is to grade."""
    if answer is None:
        return {}
    row = dict(answer) if isinstance(answer, dict) else {"reward": answer}
    if unknown := row.keys() - _ANSWER_KEYS:
        raise ValueError(
            f"the agent returned {', '.join(map(repr, sorted(map(str, unknown))))}, expected "
            f"{', '.join(_ANSWER_KEYS)}"
        )
    errors = row.get("tool_errors", 0.0)
    by_turn = f"{turns} finite numbers, one a turn"
    for name, is_good, expected in (
        ("reward", _is_number(row.get("reward", 0.0)), "a finite number"),
        (
            "tool_errors",
            _is_number(errors) or _are_by_turn(errors, turns),
            f"a finite number, or {by_turn}",
        ),
        ("turn_rewards", _are_by_turn(row.get("turn_rewards", ()), turns), by_turn),
    ):
        if not is_good:
            raise ValueError(f"the agent returned {name}={row[name]!r}, expected {expected}")
    total = sum(row.get("turn_rewards", ())) + row.get("reward", 0.0)
    if not _is_number(total):
        raise ValueError(f"the agent returned rewards whose sum is {total}, expected a finite one")
    if not isinstance(row.get("correct", False), bool):
        raise ValueError(f"the agent returned correct={row['correct']!r}, expected true or false")
    return row


def _is_number(value: Any) -> bool:
    """Whether it is a number that is finite in float32, which rewards are trained in."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return abs(float(value)) <= LARGEST_REWARD  # NaN is not


def _are_by_turn(values: Any, turns: int) -> bool:
    return (
        isinstance(values, Sequence) and len(values) in (0, turns) and all(map(_is_number, values))
    )
