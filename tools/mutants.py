"""Mutation testing: how many small changes to the code do its tests notice? `make mutants
ROOMS="algorithms rewards"`.

Each room is mutated in a copy of the working tree, runs/mutants/ROOM, with the tests named below. A
run that was interrupted goes on where it stopped, and after a change of a function only its mutants
are run again; with AGAIN=1 in the environment survivors are too, after a change of tests.
SAMPLE=0.1 runs a tenth of the mutants, always the same, and WORKERS=4 four at a time; with
SECONDS_EACH=10 what survives the quickest ten seconds of its tests counts as a survivor. Survivors
that no test is to kill stand with the reason in tests/mutants.toml; any other is listed, and the
exit code is 1 below 95 % killed. Runs with the Python of .venv-mutants (requirements/mutants.txt).
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import libcst as cst
from mutmut.mutation.diff_apply import get_diff_for_mutant

ROOT = Path(__file__).resolve().parent.parent
ACCEPTED = ROOT / "tests" / "mutants.toml"
LEAST_KILLED = 0.95
# The tests of each room that take seconds. Ranks run in the tests' own process (tests/ranks.py):
# which test reaches which function is not seen from a forked one.
ROOMS: dict[str, tuple[str, ...]] = {
    "agents": (
        *(
            f"tests/agents/test_{name}.py"
            for name in (
                "calls",
                "endpoint",
                "given_agents",
                "probed_turns",
                "rewriting",
                "windowed_episodes",
            )
        ),
        "tests/agents/test_episodes.py::test_an_agent_that_cannot_be_run_is_refused_by_name",
        "tests/agents/test_episodes.py::test_verifiers_that_are_not_there_are_refused_by_name",
    ),
    "algorithms": ("tests/algorithms",),
    "config": (
        "tests/config",
        "tests/checks",
        "tests/algorithms/test_algorithm_config.py",
        "tests/checkpoint/test_config_change.py",
        "tests/cli/test_bad_input.py",
        "tests/cli/test_limits.py",
        "tests/cli/test_records.py",
        "tests/data/test_microbatch.py",
        "tests/data/test_prompts.py",
        "tests/data/test_text_tokenizer.py",
        "tests/engines/test_rollout_config.py",
        "tests/evaluation/test_external_server.py",
        "tests/examples/test_aime.py",
        "tests/megatron/test_invariance_refusals.py",
        "tests/operations/test_compare.py",
        "tests/operations/test_plan_memory.py",
        "tests/operations/test_plan_residency.py",
        "tests/operations/test_push.py",
        "tests/rewards/test_grading.py",
        "tests/tools/test_describe_config.py",
        "tests/training/test_estimates.py",
        "tests/training/test_old_logprobs.py::test_it_fires_only_where_it_is_exact",
        "tests/training/test_windowed_updates.py",
    ),
    "data": ("tests/data", "tests/cli/test_records.py"),
    "rewards": (
        *sorted(
            f"tests/rewards/{path.name}"
            for path in (ROOT / "tests" / "rewards").glob("test_*.py")
            if path.name != "test_agreement.py"
        ),
        "tests/rewards/test_agreement.py::test_plain_comparison_is_reflexive_and_never_raises",
    ),
    "rollout": (
        *(
            f"tests/rollout/test_{name}.py"
            for name in (
                "dispatcher",
                "engine_queue",
                "engine_requests",
                "engine_work",
                "ledger",
                "packed_groups",
                "stream_limits",
                "windows",
            )
        ),
        "tests/rollout/test_killed_streams.py::test_a_group_that_cancels_itself_fails_the_step",
        "tests/engines/test_client.py",
        "tests/training/test_collect_switches.py",
        "tests/training/test_rollouts.py",
    ),
    "training": (
        "tests/training/test_calibrated_advantages.py",
        "tests/training/test_collect_switches.py",
        "tests/training/test_context_parts.py::test_a_rank_computes_its_chunks_of_whole_samples",
        *(
            f"tests/training/test_doors.py::test_a_{name}"
            for name in ("mask_is_drawn_behind_the_verifier", "wrong_mask_is_refused")
        ),
        "tests/training/test_doors.py::test_a_mask_and_observations_are_both_left_out",
        "tests/training/test_estimate_switches.py",
        "tests/training/test_estimates.py",
        "tests/training/test_fault_checks.py",
        "tests/training/test_loss_metrics.py",
        "tests/training/test_old_logprobs.py::test_it_fires_only_where_it_is_exact",
        "tests/training/test_pretraining_without_models.py",
        "tests/training/test_reference_and_values.py",
        "tests/training/test_rollouts.py",
        "tests/training/test_rollouts_of_agents.py",
        "tests/training/test_scoring_without_models.py",
        "tests/training/test_shards_on_threads.py",
        "tests/training/test_shards.py::test_homes_hold_whole_groups_and_about_as_many_tokens_each",
        "tests/training/test_shards.py::test_what_goes_by_samples_is_in_the_table",
        "tests/training/test_skip_causes.py",
        "tests/training/test_step_switches.py::test_a_rollout_is_cut_into_the_steps_that_were_asked_for",
        "tests/training/test_step_switches.py::test_a_step_reports_what_happened",
        "tests/training/test_step_switches.py::test_metrics_of_several_steps_are_means_and_maxima",
        "tests/training/test_step_switches.py::test_old_logprobs_of_only_update_are_scored_only_if_needed",
        "tests/training/test_steps_without_models.py",
        "tests/training/test_switch_pairs.py",
        "tests/training/test_tracker.py",
        "tests/training/test_user_functions.py",
        "tests/training/test_value_pretraining.py",
        "tests/training/test_value_pretraining_switches.py",
        "tests/training/test_windowed_updates.py",
    ),
    "weights": ("tests/weights/test_convert_adapters.py", "tests/megatron/test_adapters.py"),
}
# What computes. The others start processes, and end or write something: a test of theirs takes
# minutes.
MODULES = {
    "agents": ("episodes", "recording"),
    "training": (
        "advantages",
        "collect",
        "exchange",
        "losses",
        "metrics",
        "part_exchange",
        "rollouts",
        "score",
        "shards",
        "skipped_updates",
        "updates",
        "user_functions",
        "value_pretraining",
    ),
    "weights": ("adapters",),
}
# Lines that only processes of their own reach, which no test is seen to reach: the tests that have
# such processes.
UNSEEN = {
    "rewards": [
        f"tests/rewards/test_{name}.py" for name in ("code", "grading", "pool", "verifier_registry")
    ],
}
# What mutmut's exit codes say; others are time limits and crashes, which count as killed.
SURVIVED = "survived"
NO_TESTS = "no tests"
NOT_RUN = "not run"
STATES = {0: SURVIVED, 33: NO_TESTS, 5: NO_TESTS, None: NOT_RUN, 34: "skipped"}


class WithoutDecorator(cst.CSTTransformer):
    """mutmut leaves decorated functions alone. What says the same: @torch.no_grad() as a with
    statement, and a property as a method that is made one in the next line."""

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef | cst.FlattenSentinel[cst.BaseStatement]:
        """Called by libcst on each function."""
        decorators = updated_node.decorators
        body = updated_node.body
        if len(decorators) != 1 or not isinstance(body, cst.IndentedBlock):
            return updated_node
        call = decorators[0].decorator
        said = cst.Module([]).code_for_node(call)
        name = updated_node.name.value
        if said in ("property", "cached_property"):
            made = cst.parse_statement(f"{name} = {said}({name})")
            return cst.FlattenSentinel([updated_node.with_changes(decorators=()), made])
        if said != "torch.no_grad()":
            return updated_node
        has_docstring = updated_node.get_docstring() is not None
        docstring = body.body[:has_docstring]
        rest = body.body[has_docstring:]
        block = cst.With(items=[cst.WithItem(call)], body=cst.IndentedBlock(rest))
        return updated_node.with_changes(
            decorators=(), body=body.with_changes(body=(*docstring, block))
        )


def prepare(room: str) -> Path:
    """A copy of the tracked files of the working tree with mutmut's settings for a room; earlier
    results stay."""
    copy = ROOT / "runs" / "mutants" / room
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    names = [name for name in listed.splitlines() if (ROOT / name).is_file()]
    for name in names:
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        content = (ROOT / name).read_bytes()
        if name.startswith(f"vapo_megatron/{room}/") and name.endswith(".py"):
            content = cst.parse_module(content.decode()).visit(WithoutDecorator()).code.encode()
            # As __main__ no mutant of it would be found
            module = name.removesuffix(".py").replace("/", ".").encode()
            content = content.replace(
                b"    main()\n", b"    import %b\n\n    %b.main()\n" % (module, module)
            )
        if name == "pyproject.toml":
            content += settings(room, names).encode()
        if not target.is_file() or target.read_bytes() != content:
            target.write_bytes(content)
            shutil.copymode(ROOT / name, target)
    return copy


def settings(room: str, names: list[str]) -> str:
    """The section of pyproject.toml that mutmut reads. Messages of errors are text, not
    behaviour."""
    tops = sorted({name.partition("/")[0] for name in names} - {"vapo_megatron", "pyproject.toml"})
    modules = [f"vapo_megatron/{room}/{module}.py" for module in MODULES.get(room, ("*",))]
    return f"""
[tool.mutmut]
source_paths = ["vapo_megatron"]
only_mutate = {json.dumps(modules)}
also_copy = {json.dumps(tops)}
pytest_add_cli_args_test_selection = {json.dumps(ROOMS[room])}
pytest_add_cli_args = ["-p", "no:cacheprovider", "-o", "timeout=0"]
timeout_multiplier = 3
do_not_mutate_patterns = ["raise [A-Z]", "assert "]
"""


def is_there(test: str) -> bool:
    """Whether there is such a test, as pytest names it, or a folder of them."""
    name, _, function = test.partition("::")
    path = ROOT / name
    return path.exists() and (not function or f"def {function}(" in path.read_text())


def run(copy: Path, modules: list[str]) -> None:
    """Run what has not been run yet; of these modules, or of all."""
    environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "RANKS_IN_PROCESS": "1"}
    how = {
        "children": int(os.environ.get("WORKERS", "1")),
        "modules": modules,
        "sample": float(os.environ.get("SAMPLE", "1")),
        "again": bool(os.environ.get("AGAIN")),
        "seconds": float(os.environ.get("SECONDS_EACH", "inf")),
        "unseen": UNSEEN.get(copy.name, []),
    }
    if how["again"]:  # a test that was changed may reach something else
        (copy / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)
    script = ROOT / "tools" / "mutant_session.py"
    subprocess.run(
        [sys.executable, str(script), json.dumps(how)], cwd=copy, env=environment, check=False
    )


def results(copy: Path, room: str) -> Iterator[tuple[str, str, str]]:
    """Module, name and state of every mutant."""
    for meta in sorted((copy / "mutants" / "vapo_megatron" / room).rglob("*.meta")):
        module = meta.name.removesuffix(".py.meta")
        for name, code in json.loads(meta.read_text())["exit_code_by_key"].items():
            yield module, name, STATES.get(code, "killed")


def changed_lines(copy: Path, room: str, name: str) -> str:
    """What a mutant changes: its lines that begin with - and +, joined."""
    with contextlib.chdir(copy):
        shown = get_diff_for_mutant(name, path=f"vapo_megatron/{room}/{name.split('.')[-2]}.py")
    return " ".join(
        " ".join(line.split())
        for line in shown.splitlines()
        if line.startswith(("-", "+")) and not line.startswith(("---", "+++"))
    )


def summarize(copy: Path, room: str) -> bool:
    """Print the table of a room and the survivors without a reason; whether enough are killed."""
    accepted = tomllib.loads(ACCEPTED.read_text())
    found = list(results(copy, room))
    table: dict[str, Counter[str]] = {}
    for module, _, state in found:
        table.setdefault(module, Counter())[state] += 1
    print(f"{room:28} killed  survived  no tests  not run    killed %")
    survivors = []
    reasons = 0
    for module, counts in table.items():
        decided = counts["killed"] + counts[SURVIVED] + counts[NO_TESTS]
        share = f"{counts['killed'] / decided:9.1%}" if decided else "        -"
        row = (counts["killed"], counts[SURVIVED], counts[NO_TESTS], counts[NOT_RUN])
        print(f"{module:28} {row[0]:6} {row[1]:9} {row[2]:9} {row[3]:8}  {share}")
    for _, name, state in found:
        if state in (SURVIVED, NO_TESTS):
            lines = changed_lines(copy, room, name)
            if lines in accepted.get(room, ()) or any(
                re.fullmatch(pattern, lines) for pattern in accepted["everywhere"]
            ):
                reasons += 1
            else:
                survivors.append(f"{state}: {name}: {lines}")
    killed = sum(counts["killed"] for counts in table.values())
    decided = killed + len(survivors) + reasons
    print(
        f"{room}: {killed} of {decided} killed, {reasons} survivors with a reason in "
        f"{ACCEPTED.name}"
    )
    print("\n".join(survivors))
    return decided > 0 and (killed + reasons) / decided >= LEAST_KILLED


def main(rooms: list[str]) -> int:
    """rooms: names of ROOMS, `ROOM:MODULE,MODULE` for these alone; all without any. `--summary`
    first runs nothing."""
    only_summary = rooms[:1] == ["--summary"]
    good = True
    for choice in rooms[only_summary:] or list(ROOMS):
        room, _, modules = choice.partition(":")
        if room not in ROOMS:
            print(
                f"mutants: {room} is no room, expected one of {', '.join(ROOMS)}", file=sys.stderr
            )
            return 2
        if gone := [test for test in ROOMS[room] if not is_there(test)]:
            print(
                f"mutants: this script names {gone[0]} for {room}, which is not there: mend it",
                file=sys.stderr,
            )
            return 2
        copy = ROOT / "runs" / "mutants" / room
        if not only_summary:
            run(prepare(room), modules.split(",") if modules else [])
        good = summarize(copy, room) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
