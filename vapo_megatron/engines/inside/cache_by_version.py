"""What a server has cached of prompts is read under the weights alone that it was made by."""

from typing import Any

from sglang.srt.managers.scheduler import get_serving


def cache_by_version(scheduler: Any) -> None:
    """Have SGLang's scheduler class keep apart what weights of different versions have cached.

    A weight sync that leaves responses in place leaves the cache as well. A request that still waits then, behind
    others to the same prompt, would read what the old weights made of it, and be marked with the new version.
    """
    add, record = scheduler._add_request_to_queue, scheduler.record_weight_version_change

    def add_request(self: Any, req: Any, *args: Any, **kwargs: Any) -> None:
        req.extra_key = get_serving().weight_version
        add(self, req, *args, **kwargs)

    def record_change(self: Any, new_version: str | None) -> None:
        record(self, new_version)
        for req in self.waiting_queue:
            req.extra_key = get_serving().weight_version

    scheduler._add_request_to_queue, scheduler.record_weight_version_change = add_request, record_change
