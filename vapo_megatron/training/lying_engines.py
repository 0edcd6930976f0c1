"""Which engine wrote what its weights cannot have written: the trainer's log-probs of a step's responses say so."""

from collections import Counter
from collections.abc import Sequence
from statistics import median

from vapo_megatron.engines.engines import Engines
from vapo_megatron.training.metrics import over_tokens
from vapo_megatron.training.shards import ShardedBatch

# Below this a rare token says too much of an engine.
_LEAST_TOKENS = 256
# What all engines differ by, as the trainer computes otherwise or has newer weights, is nobody's fault.
_TIMES = 10.0


def end_lying_engines(engines: Engines, batch: ShardedBatch, written_by: Sequence[str]) -> None:
    """Collective: end engines whose responses are not of the weights that they were given, and start them again.

    The probe of a weight sync is short, and prefilled: decoding, long contexts and full batches are not in it.

    written_by: on rank 0, see Rollouts; empty on others.
    """
    own = batch.own
    if own.old_logprobs is None:  # the rollout was not fit to be trained on
        return
    (apart,) = over_tokens(batch, (own.old_logprobs - own.rollout_logprobs).abs())
    if not apart.means.isfinite().all():  # no client takes such log-probs from an engine: they are the trainer's
        return
    tokens = batch.table.new_lengths
    sums = (apart.means * tokens).tolist()
    found = lying_engines(written_by, sums, tokens.tolist(), engines.limits.mean) if written_by else {}
    engines.end(
        {
            url: f"{url}: its log-probs of the step's responses are {mean:.3g} from the trainer's on average, those of "
            f"other engines {others:.3g} (rollout.sync.mean_tolerance={engines.limits.mean:g})"
            for url, (mean, others) in found.items()
        }
    )


def lying_engines(
    written_by: Sequence[str], sums: Sequence[float], tokens: Sequence[int], limit: float
) -> dict[str, tuple[float, float]]:
    """By URL, of engines that differ from the trainer as no other does: the mean |difference|, the others' median.

    sums: of the |differences| of a sample's tokens.
    """
    sums_of: Counter[str] = Counter()
    tokens_of: Counter[str] = Counter()
    for url, one, count in zip(written_by, sums, tokens, strict=True):
        sums_of[url] += one  # type: ignore[assignment]
        tokens_of[url] += count
    means = {url: sums_of[url] / count for url, count in tokens_of.items() if url and count >= _LEAST_TOKENS}
    found = {}
    for url, mean in means.items():
        others = [one for other, one in means.items() if other != url]
        if others and mean > max(limit, _TIMES * median(others)):
            found[url] = mean, median(others)
    return found
