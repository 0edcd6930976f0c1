"""The names of the metrics that console, alarms and report look for in a step's metrics.

Other packages may write any name; these have a meaning here. Lengths are in response tokens,
entropies and divergences in nats per token, times in seconds, memory in GiB.
"""

ACCURACY = "accuracy/mean"
COPIED = "accuracy/copied"  # share of correct responses whose answer restates the problem
REWARD = "reward/mean"
REWARD_MIN = "reward/min"
REWARD_MAX = "reward/max"
FRAC_ZERO_STD_GROUPS = (
    "reward/frac_zero_std_groups"  # share of groups with one reward; not where groups are of one
)

# Share of responses whose verification failed: an error, a timeout, a dead worker.
FAILED_GRADES = "reward/failed"

LENGTH = "response_length/mean"
LENGTH_MIN = "response_length/min"
LENGTH_MAX = "response_length/max"
REPEATED = "response_length/repeated"  # share of tokens that repeat a passage of their response
TRUNCATED = "response_length/truncated"  # share of responses cut off at the token limit

ENTROPY = "actor/entropy"
CLIP_LOW = "actor/clip_fraction_low"
CLIP_HIGH = "actor/clip_fraction_high"
ACTOR_GRAD_NORM = "actor/grad_norm"
# k3 estimate of KL(rollout policy || trainer's policy), mean over tokens.
TRAIN_INFER_KL = "actor/train_infer_kl"
TRAIN_INFER_KL_MAX = "actor/train_infer_kl_max"
ROLLOUT_LOGPROBS = "actor/rollout_logprobs_used"
REFERENCE_KL = "actor/ref_kl"  # k3 estimate of KL(policy || reference policy), mean over tokens
REFERENCE_KL_MAX = "actor/ref_kl_max"

VALUE_LOSS = "critic/value_loss"
EXPLAINED_VARIANCE = "critic/explained_variance"
# The same for the mean of the group's other responses and a table by position, and the critic's
# gain over both.
BASELINE_LOO = "critic/baseline_loo_ev"
BASELINE_POSITION = "critic/baseline_position_ev"
CRITIC_GAIN = "critic/gain"
CALIBRATION_SLOPE = "critic/calibration_slope"
# Values calibrated by past steps (algorithms/calibration.py): how much of the returns they explain,
# how far their differences are trusted, and the weights of the critic's value and of the group's
# mean in them.
EXPLAINED_CALIBRATED = "critic/explained_calibrated"
TRUST = "critic/trust"
CRITIC_SLOPE = "critic/past_slope"
GROUP_WEIGHT = "critic/group_weight"
TRACKED = "advantage/tracked"
# Values by regression (algorithms/regression.py): the share of the variance of returns that each
# feature explains, and the share of states behind the first one that a sibling passed as well.
REGRESSION_SHARE = "critic/share_"  # and the feature's name
REGRESSION_FEATURES = (
    "position",
    "siblings",
    "prefix",
    "surprise",
    "entropy",
    "history",
    "value",
)
SHARED_PREFIX = "critic/shared_prefix"
# And the fault's name (algorithms/critic_faults.py): 1 in the steps that show it.
CRITIC_FAULT = "critic/fault_"
SIGN_AGREEMENT = "advantage/sign_agreement"
CRITIC_GRAD_NORM = "critic/grad_norm"
# Mean of value minus return at these percentages of the response: critic/value_bias_25.
BIAS_POSITIONS = (0, 25, 50, 75, 95)
VALUE_BIAS = "critic/value_bias_"

# Writes that were refused by samples, metrics.jsonl, TensorBoard, Weights & Biases in this attempt;
# absent while 0.
TRACKER_FAILURES = "tracking/failures"

AGENT_BROKEN = "agent/broken"  # share of episodes that broke, of whatever cause
AGENT_TURNS = "agent/turns"  # responses of the policy in an episode
# Engines that were ended and started again since the last weight sync.
ENGINE_FAILURES = "rollout/engine_failures"
# Bytes of a weight sync that were sent, as a share of the weights (rollout.sync.only_changes).
SENT_SHARE = "weight_sync/sent_share"

TOKENS_PER_SECOND = "throughput/tokens_per_second"
ROLLOUT_SPEED = "throughput/rollout"  # response tokens per second of the rollout phase
RESPONSE_TOKENS = "rollout/tokens"  # of a step
# From the step before to this one, evaluations, exports and checkpoints included; and times GPUs.
HOURS = "throughput/hours"
GPU_HOURS = "throughput/gpu_hours"
# When a row was written, in seconds since 1970: in metrics.jsonl only, trackers have their own.
WRITTEN_AT = "unix_seconds"
TIME = "time/"
STEP_TIME = "time/step"

PROCESS_MEMORY = "memory/process_gib"  # resident memory of rank 0
HOST_MEMORY_USED = "memory/host_used"  # share of the memory of its host

ALARM = "alarm/"  # and the alarm's name: 1 in the steps that it holds in
SKIPPED = "skipped_updates/"  # and the cause: updates that were skipped for it
SKIPPED_UPDATES = "skipped_updates/total"
# Skipped updates of the critic without finished responses (windows), which are harmless.
UNFINISHED = "skipped_updates/unfinished"
EVALUATION = "evaluation/"  # evaluation/aime24_avg@32, evaluation/aime24_response_length, ...
AVERAGE = "_avg@"  # between the name of a set and its k, in the metric of its accuracy
PRETRAINING = (
    "value_pretraining/"  # value_pretraining/value_loss, .../explained_variance, .../value_bias_25
)


def interval_of(name: str) -> tuple[str, str]:
    """The metrics that bound evaluation/<set>_avg@k with 95 % confidence."""
    prefix = name.partition(AVERAGE)[0]
    return f"{prefix}_interval_low", f"{prefix}_interval_high"


def own_counter(name: str) -> str:
    """The counter that a metric is drawn against instead of the step, if its row has it:
    value_pretraining/iteration."""
    return name.partition("/")[0] + "/iteration"
