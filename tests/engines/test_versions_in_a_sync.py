"""A group that is drawn while weights are on their way may begin with the weights before."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vapo_megatron.config.rollout import SamplingConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.engines.engine_weights import EngineWeights
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import Completion
from vapo_megatron.engines.server.connection import EngineWrong
from vapo_megatron.engines.weight_sync.session import EngineLost
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GroupRequest, empty_response

ADDRESS = EngineAddress("http://engine:1", "no log")


class Session:
    """Sends weights, while a group is drawn; `lost`: how often the engine dies of it."""

    sends = True
    sent_share = None
    served = ()

    def __init__(self, weights: Any, lost: int) -> None:
        self.weights = weights
        self.lost = lost
        self.drawn: list[GroupRequest] = []

    def serve(self, starts: Any) -> None: ...

    def load(self, buckets: Any, version: int, times: Any, masks: Any) -> None:
        self.drawn.append(drawn_now(self.weights))
        if self.lost:
            self.lost -= 1
            raise EngineLost("gone")


def drawn_now(weights: Any) -> GroupRequest:
    sampling = SamplingConfig(max_new_tokens=9)
    prompt = Prompt("0", "", "", (1,))
    return GroupRequest(prompt, 1, sampling, 9, 0, weights.version, goes_on=True)


def check(group: GroupRequest, oldest: int, newest: int) -> None:
    completion = Completion(np.ones(2, np.int32), -np.ones(2, np.float32), "stop", oldest, newest)
    dispatcher: Any = SimpleNamespace(_vocabulary=None)
    Dispatcher._check(dispatcher, ADDRESS, [empty_response(group, 0)], [completion], group)


@pytest.mark.parametrize("lost", [0, 1])
def test_an_engine_with_both_weights_has_missed_no_sync(lost: int) -> None:
    weights: Any = EngineWeights.__new__(EngineWeights)
    weights.version = 6
    admitted = iter([0] * lost + [1])
    weights._pool = SimpleNamespace(
        wait_for_one=lambda: True,
        serving_here=dict,
        fail=lambda cause: None,
        admit=lambda *_, **__: next(admitted),
    )
    weights._session = Session(weights, lost)
    weights._slots = None
    weights._pairs = False
    weights._bucket_limit = lambda: 1
    weights._buckets = lambda *_: iter(())
    weights.update_weights(None)
    assert weights.version == 7
    for group in weights._session.drawn:
        check(group, 6, 7)
    with pytest.raises(EngineWrong, match="the engine missed a weight sync"):
        check(drawn_now(weights), 6, 7)
