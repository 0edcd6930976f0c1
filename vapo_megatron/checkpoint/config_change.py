"""Whether a run may go on with a config that is not the one it was saved with."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from pydantic import ValidationError

from vapo_megatron.config.base import Section
from vapo_megatron.errors import BadInput

SectionT = TypeVar("SectionT", bound=Section)

# What changes how far, where, how fast or how visibly a run goes, and not what it learns from: layouts change rounding
# alone. Everything else is what the run is.
_HARMLESS = (
    *("preset", "run.name", "run.root", "run.steps", "run.overwrite", "run.resume", "run.allow_config_change"),
    *("cluster", "evaluation", "data.eval", "data.steps", "data.epochs", "export", "monitoring", "checkpoint"),
    *("actor.layout", "actor.recompute", "actor.max_tokens_per_microbatch", "actor.logprob_chunk"),
    *("critic.layout", "critic.recompute", "critic.max_tokens_per_microbatch"),
    *("rollout.num_engines", "rollout.tp", "rollout.max_running_requests", "rollout.max_total_tokens", "rollout.sync"),
    *("rollout.mem_fraction_static", "rollout.memory_saver", "rollout.start_timeout_s", "rollout.collect_timeout_s"),
    *("rollout.load_format", "rollout.context_length", "rollout.external_urls", "rollout.api_key_variable"),
    *("reward.workers", "reward.response_timeout_s", "reward.memory_mib"),
)


def check_config_change(now: SectionT, checkpoint: Path, allowed: Sequence[str]) -> None:
    """Raises BadInput, naming every such key, where the config is not the one that a checkpoint was saved with.

    Args:
        now: the config of this attempt of the run.
        checkpoint: holds the config of the life before, config.yaml.
        allowed: keys, or sections, in which a change is meant (run.allow_config_change).
    """
    path = checkpoint / "config.yaml"
    try:
        before = type(now).model_validate(OmegaConf.to_container(OmegaConf.load(path), resolve=True))
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(
            f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}: go on with the version of vapo_megatron that "
            "saved it"
        ) from None
    found = differences(before.model_dump(mode="json"), now.model_dump(mode="json"))
    changed = [(key, old, new) for key, old, new in found if not _within(key, (*_HARMLESS, *allowed))]
    if changed:
        told = "; ".join(f"{key}={new}: the run was saved with {old}" for key, old, new in changed)
        it, keys = "it" if len(changed) == 1 else "them", ",".join(key for key, _, _ in changed)
        raise BadInput(
            f"{told} ({checkpoint}); set {it} back, start another run, or mean {it} with "
            f"run.allow_config_change=[{keys}]"
        )


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of every value in which two nested mappings differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new


def _within(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
