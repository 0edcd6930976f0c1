"""The same table on a terminal and in a log, where it is plain lines."""

import io

from vapo_megatron.monitoring.console import HEAD_EVERY, RunConsole


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


METRICS = {
    "accuracy/mean": 0.75,
    "response_length/mean": 31.25,
    "throughput/tokens_per_second": 12345.0,
}


def test_a_log_has_neither_colours_nor_carriage_returns() -> None:
    log = io.StringIO()
    console = RunConsole(log, log_seconds=0.0)
    console.header("train", {"model": "a [bold]name[/bold]"})
    with console.phase("rollout", total=4) as advance:
        advance(1)
        advance(3)
    console.step(1, 60, METRICS)
    console.alarm("trouble")
    console.closing("done", {"report": "x" * 300})
    text = log.getvalue()
    assert "\x1b" not in text and "\r" not in text
    assert "rollout: 1/4 (25%)" in text and "rollout: 4/4 (100%)" in text
    assert "a [bold]name[/bold]" in text
    assert "x" * 300 in text


def test_a_quick_phase_leaves_a_log_alone() -> None:
    log = io.StringIO()
    with RunConsole(log).phase("rollout", total=4) as advance:
        advance(4)
    assert log.getvalue() == ""


def test_columns_stand_under_their_titles() -> None:
    log = io.StringIO()
    console = RunConsole(log)
    console.step(1, 60, METRICS)
    console.step(
        60, 60, METRICS | {"accuracy/mean": float("nan"), "reward/mean": None, "actor/entropy": 0.5}
    )
    head, first, last = log.getvalue().splitlines()
    assert len(head) == len(first) == len(last)
    end = head.index("accuracy") + len("accuracy")
    assert first[:end].endswith(" 0.750") and last[:end].endswith(" -")
    assert first[: head.index("tok/s") + len("tok/s")].endswith("12,345")


def test_the_head_of_the_table_comes_again() -> None:
    log = io.StringIO()
    console = RunConsole(log)
    for step in range(HEAD_EVERY + 1):
        console.step(step, 60, METRICS)
    heads = [
        number for number, line in enumerate(log.getvalue().splitlines()) if "accuracy" in line
    ]
    assert heads == [0, HEAD_EVERY + 1]


def test_a_terminal_gets_a_bar_that_goes_away_and_colours() -> None:
    terminal = Terminal()
    console = RunConsole(terminal)
    with console.phase("rollout", total=4) as advance:
        advance(4)
    console.alarm("trouble")
    assert "rollout" in terminal.getvalue() and "4/4" in terminal.getvalue()
    assert "\x1b[" in terminal.getvalue().splitlines()[-1]


def test_other_ranks_say_nothing() -> None:
    for output in (io.StringIO(), Terminal()):
        console = RunConsole(output, enabled=False, log_seconds=0.0)
        console.header("train", {"model": "m"})
        console.step(1, 2, METRICS)
        with console.phase("rollout", total=2) as advance:
            advance(1)
        assert output.getvalue() == ""


def test_a_wide_table_is_whole_in_a_log() -> None:
    log = io.StringIO()
    titles = ["part", "GiB", *(f"update_policy_{number}" for number in range(12))]
    RunConsole(log).table(titles, [["actor optimizer", "0.125", *["device"] * 12]])
    text = log.getvalue()
    assert "0.125" in text and "update_policy_11" in text and "…" not in text
    assert max(len(line) for line in text.splitlines()) < 300
