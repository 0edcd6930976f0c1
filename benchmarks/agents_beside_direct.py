"""How much longer a rollout takes through the agents' endpoint than directly, with a real engine on
two cores.

    python -m benchmarks.agents_beside_direct [--responses 256] [--tokens 128] [--repeats 7] [--json
    FILE]

Each response is an episode of one turn, or is asked of the engine directly; both draw the same
tokens of a random model of the quickstart's size. The engine is a process of its own on the same
cores, as in a run on a laptop; both ways take turns, round by round.
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.agents_load import TEMPLATE, WORDS
from benchmarks.common import in_turns, parser, publish, ratio_figure
from vapo_megatron.agents.episodes import Agents
from vapo_megatron.config.data import PromptTemplate
from vapo_megatron.config.rollout import EpisodeConfig, RolloutConfig, SamplingConfig
from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.weights.tiny import save_tiny_model, word_tokenizer

GROUP = 8


async def run(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    """An agent of one turn."""
    answer = await http_client.post(
        f"{base_url}/chat/completions", json={"messages": task["messages"]}
    )
    answer.raise_for_status()
    return 1.0


def same_tokens(episodes: list[Sample], responses: list[Sample]) -> bool:
    """Whether both ways drew the same; the end token of a turn is a token of its response."""
    return all(
        map(
            np.array_equal,
            *([sample.response_ids for sample in side] for side in (episodes, responses)),
        )
    )


def main() -> None:
    """One row, and the ratio round by round."""
    arguments = parser(__doc__)
    arguments.add_argument("--responses", type=int, default=256)
    arguments.add_argument("--tokens", type=int, default=128, help="of a response, at most")
    arguments.add_argument("--repeats", type=int, default=7)
    given = arguments.parse_args()
    config = RolloutConfig(
        agent="benchmarks.agents_beside_direct:run",
        episode=EpisodeConfig(max_turns=1, max_tokens=4 * given.tokens),
        max_running_requests=given.responses,
        context_length=4 * given.tokens,
        deterministic=True,
    )
    with TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shape = TinyModel(
            vocab_size=256, layers=4, hidden_size=128, intermediate_size=384, max_positions=8192
        )
        save_tiny_model(shape, word_tokenizer(WORDS, 8192, TEMPLATE), model)
        tokenizer = TextTokenizer(model, PromptTemplate(chat_template=True))
        with (
            EngineServer(model, config, "float32", Path(folder) / "engine.log") as server,
            Dispatcher([server.address], config, [tokenizer.eos_id]) as dispatcher,
        ):
            agents = Agents(dispatcher, tokenizer, config)
            sampling = SamplingConfig(max_new_tokens=given.tokens)
            words = [f"w{n} w{n + 1}" for n in range(given.responses // GROUP)]
            prompts = [
                Prompt(str(n), text, "", tuple(tokenizer.encode_prompt(text)), cursor=n)
                for n, text in enumerate(words)
            ]
            request = GenerationRequest(prompts, GROUP, sampling, seed=1, weight_version=0)
            ways = (
                partial(dispatcher.collect, request, generate=agents.generate),
                partial(dispatcher.collect, request),
            )
            if not same_tokens(*(way() for way in ways)):
                raise SystemExit("an episode of one turn has other tokens than the response")
            through_endpoint, directly = in_turns(ways, given.repeats)
            agents.close()
    row = {
        "responses": given.responses,
        "tokens": given.tokens,
        "direct s": float(np.median(directly)),
        "through the endpoint s": float(np.median(through_endpoint)),
    }
    figure = ratio_figure(
        "a rollout through the endpoint over a direct one", through_endpoint, directly
    )
    publish("episodes of one turn beside direct responses", [row], given.json, [figure])


if __name__ == "__main__":
    main()
