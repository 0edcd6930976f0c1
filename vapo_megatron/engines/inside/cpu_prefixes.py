"""Prompts that waiting requests share are computed once, without a GPU.

SGLang 0.5.23 keeps the keys and values of prefixes, but requests that arrive together are computed
in one batch, each with its whole prompt: its policy "lpm" moves some that share a prefix with an
earlier one to the end of the queue, and the batch takes them all the same. Here the batch ends
before them, and the next one finds the prefix in the cache.
"""

from collections.abc import Callable, Collection
from typing import Any

# Tokens that are not in the cache for which a request waits.
_LEAST_TOKENS = 16
# Requests in a queue above which SGLang looks at no prefixes; it says 128.
_LONGEST_QUEUE = 4096


def install_waiting() -> None:
    """Have requests wait for a prefix that another one of the queue is about to compute. Only
    policies that look at prefixes do so (server_args.schedule_policy)."""
    from sglang.srt.managers import schedule_policy

    schedule_policy.WAITING_QUEUE_PREFIX_MATCH_MAX = _LONGEST_QUEUE
    policy = schedule_policy.SchedulePolicy
    adder = schedule_policy.PrefillAdder
    waiting: set[str] = set()
    policy.calc_priority = _forgetting(policy.calc_priority, waiting)
    policy._compute_prefix_matches = _with_siblings(policy._compute_prefix_matches, waiting)
    end_of_batch = schedule_policy.AddReqResult.OTHER
    adder.add_one_req = _ending_before(adder.add_one_req, waiting, end_of_batch)


def _forgetting(sort: Callable[..., None], waiting: set[str]) -> Callable[..., None]:
    """Forgets who waited when the queue was sorted last."""

    def run(*args: Any, **options: Any) -> None:
        waiting.clear()
        sort(*args, **options)

    return run


def _with_siblings(matches: Callable[..., set[str]], waiting: set[str]) -> Callable[..., set[str]]:
    """Adds siblings to the requests that SGLang would delay, and keeps the names of both."""

    def run(policy: Any, queue: Collection[Any], *args: Any) -> set[str]:
        waiting.update(matches(policy, queue, *args))
        waiting.update(siblings(queue))
        return set(waiting)

    return run


def siblings(queue: Collection[Any]) -> set[str]:
    """Names of the requests (rid) whose tokens equal those of one before them in the queue, where
    less of them than could be is in the cache (prefix_len)."""
    seen: set[tuple[int, ...]] = set()
    found: set[str] = set()
    for request in queue:
        tokens = (*request.origin_input_ids, *request.output_ids)
        if tokens in seen and len(tokens) - request.prefix_len > _LEAST_TOKENS:
            found.add(request.rid)
        seen.add(tokens)
    return found


def _ending_before(
    add: Callable[..., Any], waiting: set[str], end_of_batch: Any
) -> Callable[..., Any]:
    """Ends a batch before the first request that waits, unless the batch would be empty."""

    def run(adder: Any, request: Any, *args: Any, **options: Any) -> Any:
        if request.rid in waiting and adder.can_run_list:
            return end_of_batch
        return add(adder, request, *args, **options)

    return run
