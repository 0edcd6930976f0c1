"""The order of test files, and the parts of them that continuous integration runs."""

import zlib

import pytest

# Files whose tests use the engine of engine_server.py: one worker runs them all, and starts it
# once.
ONE_ENGINE = ("test_weight_sync.py", "test_episodes.py", "test_rollout_engine.py")
# Files that take a quarter of a minute and more, the longest first: begun at last, one would keep a
# worker after the others.
LONGEST = (
    "test_slurm_stories.py",
    "test_smollm_gates.py",
    "test_asynchronous.py",
    "test_gsm8k_two_steps.py",
    "test_gpu_suite.py",
    "test_invariance_full.py",
    "test_fault_soak.py",
    "test_distillation_example.py",
    "test_quickstart_one_gpu.py",
    "test_resume.py",
    *ONE_ENGINE,
    "test_train_command.py",
    "test_invariance.py",
    "test_step_switches.py",
    "test_watchdog.py",
    "test_dist_saver.py",
    "test_convert.py",
)


# From the environment, such as 2/3: the second of three parts of the files, about equally long.
SLICE = "TESTS_SLICE"


def in_order(items: list[pytest.Item], slice_name: str | None) -> list[pytest.Item]:
    """Put the tests of long files first, and take out those of other slices, which are returned;
    None: there are no slices."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    if slice_name is None:
        return []
    number, _, of = slice_name.partition("/")

    def is_left_out(item: pytest.Item) -> bool:
        # The long ones in turn
        name = item.path.name
        return places.get(name, zlib.crc32(name.encode())) % int(of) + 1 != int(number)

    left_out = [item for item in items if is_left_out(item)]
    items[:] = [item for item in items if not is_left_out(item)]
    return left_out
