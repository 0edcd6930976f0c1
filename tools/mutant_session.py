"""mutmut's run in the current folder, for tools/mutants.py, with what makes it quick and whole.

Tests are collected once, and each mutant is a fork of the process that has them; it runs the tests
that reach the line that it changes (mutant_lines.py); what the fixtures of a module reach belongs
to each of its tests, not to the first; lines that only processes of their own reach are given
their tests by hand; and limits of time are those of the processor, for a machine that does other
work too.
"""

import json
import os
import signal
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import ceil
from time import perf_counter
from typing import Any

import _pytest.config
import mutmut.__main__ as mutmut
import pytest
import torch.distributed as dist
from mutant_lines import LinesReached, reaching
from mutmut.configuration import config
from mutmut.runners.harness import BadTestExecutionCommandsException, PytestRunner
from mutmut.state import state
from mutmut.utils.file_utils import change_cwd
from mutmut.utils.format_utils import mangled_name_from_mutant_name
from mutmut.workers import isolation


class Reached:
    """A pytest plugin: which test reaches which function and line, and how long it takes with its
    fixtures."""

    def __init__(self) -> None:
        self.fixtures: dict[Any, tuple[set[str], float]] = {}
        self.lines = LinesReached()
        self.test = ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Called before a test and its fixtures."""
        self.test = nodeid
        self.lines.at_work(nodeid)
        self.lines.counts_for(nodeid, nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """What a fixture of a module or session reaches is kept for all tests that have it."""
        if fixturedef.scope == "function":
            return (yield)
        outer = set(state()._stats)
        state()._stats.clear()
        start = perf_counter()
        self.lines.at_work(str(id(fixturedef)))
        try:
            return (yield)
        finally:
            self.lines.at_work(self.test)
            self.fixtures[fixturedef] = set(state()._stats), perf_counter() - start
            state()._stats.update(outer)

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Called after each phase of a test."""
        if call.when == "call":
            state().duration_by_test[item.nodeid] = call.duration

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: Any) -> None:
        """Called when a test is over."""
        reached = set(state()._stats)
        for fixture in set(item._request._fixture_defs.values()) & set(self.fixtures):
            functions, seconds = self.fixtures[fixture]
            reached |= functions
            self.lines.counts_for(str(id(fixture)), item.nodeid)
            state().duration_by_test[item.nodeid] += seconds
        for function in reached:
            state().tests_by_mangled_function_name[function].add(item.nodeid)
        state()._stats.clear()


class Deadline:
    """A pytest plugin for a mutant's tests: one that waits for what never comes ends the process,
    with its mutant."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> None:
        """Called before each test. By the clock, with room for a busy machine."""
        signal.alarm(10 + int(5 * state().duration_by_test[item.nodeid]))


class CollectedOnce(PytestRunner):
    """Tests in a session of pytest that is open already."""

    clean = False
    ordered: Sequence[str] = ()  # of the next mutant

    def collect(self) -> None:
        """Open the session. Nothing is captured: this process's output is mutmut's."""
        arguments = ["--rootdir=.", "--tb=native", "-x", "-q", "-s", *self._pytest_add_cli_args]
        with change_cwd("mutants"):
            pytest_config = _pytest.config._prepareconfig(
                [*arguments, *self._pytest_add_cli_args_test_selection]
            )
            self.session = pytest.Session.from_config(pytest_config)
            pytest_config._do_configure()
            pytest_config.hook.pytest_sessionstart(session=self.session)
            pytest_config.hook.pytest_collection(session=self.session)
        self.items = {item.nodeid: item for item in self.session.items}

    def run_stats(self, *, tests: Iterable[str]) -> int:
        """Run tests, or all, and note what they reach."""
        with change_cwd("mutants"):
            reached = Reached()
            failed = int(
                self.execute_pytest(self._pytest_args_regular_run(tests), plugins=[reached])
            )
            reached.lines.save(every_test=not tests)
        self.clean = not failed and not tests
        return failed

    def run_forced_fail(self) -> int:
        """Whether tests fail where every function does: conftest.py may, before there is a test."""
        self.clean = False
        try:
            return super().run_forced_fail()
        except BadTestExecutionCommandsException:
            return 1

    def run_tests(self, *, mutant_name: str | None, tests: Iterable[str]) -> int:
        """The tests of a mutant, in its process."""
        if mutant_name is None:
            # Without a mutant they were just run, where that was all of them.
            return 0 if self.clean else super().run_tests(mutant_name=None, tests=tests)
        self.session.items = [self.items[test] for test in self.ordered if test in self.items]
        self.session.config.pluginmanager.register(Deadline())
        os.chdir("mutants")
        try:
            self.session.config.hook.pytest_runtestloop(session=self.session)
        except pytest.Session.Failed:
            return 1
        return 1 if self.session.testsfailed else 0


class Runner(isolation.ForkRunner):
    """Forks of the process with the open session."""

    most_seconds = float("inf")
    unseen: Sequence[str] = ()  # files of tests for lines that no test is seen to reach

    def startup(self) -> None:
        """Called before the first mutant. What ranks have left has threads, which no fork would
        have."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self.test_runner.collect()
        super().startup()

    def submit(
        self, mutant_name: str, tests: list[str], cpu_time_limit: int, estimated_time: float
    ) -> None:
        """Called for each mutant with the tests of its function."""
        durations = state().duration_by_test
        with change_cwd("mutants"):
            chosen = reaching(mutant_name, tests, durations)
        if not chosen:
            elsewhere = [test for test in durations if test.partition("::")[0] in self.unseen]
            chosen = sorted(elsewhere, key=lambda test: durations[test])
        seconds = list(accumulate(durations[test] for test in chosen))
        chosen = chosen[: max(1, sum(total <= self.most_seconds for total in seconds))]
        estimated_time = sum(durations[test] for test in chosen)
        self.test_runner.ordered = chosen
        super().submit(mutant_name, chosen, ceil(estimated_time + 1) * 6, estimated_time)


def main(
    children: int,
    modules: list[str],
    sample: float,
    again: bool,
    seconds: float,
    unseen: list[str],
) -> None:
    """Run what was not run yet. modules: these alone; sample: a part of the mutants; again:
    survivors too; seconds: of tests that a mutant gets; unseen: files of tests that start
    processes, for lines that no test is seen to reach."""
    Runner.most_seconds = seconds
    Runner.unseen = unseen
    everything = mutmut.collect_source_file_mutation_data
    limit = isolation.register_timeout

    def chosen(mutant_names: Iterable[str]) -> Any:
        mutants, files = everything(mutant_names=[])
        tests = state().tests_by_mangled_function_name
        picked = []
        for data, name, result in mutants:
            module = name.split(".")[-2]
            function = mangled_name_from_mutant_name(name)
            if unseen and not tests.get(function):
                # Without any it would not be submitted.
                tests[function] = {
                    t for t in state().duration_by_test if t.partition("::")[0] in unseen
                }
            if (not modules or module in modules) and zlib.crc32(name.encode()) < sample * 2**32:
                picked.append((data, name, None if again and result in (0, 5, 33) else result))
        return picked, files

    mutmut.collect_source_file_mutation_data = chosen
    mutmut.get_mutant_runner = lambda max_workers=1: Runner(
        max_workers, CollectedOnce(), config().debug
    )
    isolation.register_timeout = lambda pid, timeout_s: limit(pid, 20 * timeout_s)
    mutmut._run([], children)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
