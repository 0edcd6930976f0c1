"""The page of a report, as a browser shows it: curves, samples, several runs, evaluations, a run
that goes on."""

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vapo_megatron.errors import BadInput
from vapo_megatron.operations.report.report import make_server, write_report

HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x "
    "onerror=\"document.title='taken'\"> \u2028"
)
Browse = Callable[[str], str]


def train_run(folder: Path, steps: int = 3, name: str = "my run") -> Path:
    made = folder / name
    (made / "samples").mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "accuracy/mean": step / 10,
            "reward/mean": step / 10,
            "time/step": 2.0,
            "time/rollout": 1.5,
            "memory/rollout_gib": 1.25,
            "actor/train_infer_kl": 0.001,
            "agent/turns": 2.0,
            "agent/tool_errors": 0.5,
            "alarm/train_infer_gap": 1.0 if step == 2 else None,
        }
        for step in range(1, steps + 1)
    ]
    ends = {
        "evaluation/unseen_avg@4": 0.5,
        "evaluation/unseen_interval_low": 0.4,
        "evaluation/unseen_interval_high": 0.6,
    }
    rows[-1] |= ends
    (made / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "config.yaml").write_text(f"preset: vapo # {HOSTILE}\n")
    samples = [
        {"problem": f"p{n}", "answer": "1", "response": f"{HOSTILE} number {n}", "tokens": 10 * n, (
            "reward"
        ): n % 2,
         "correct": bool(n % 2), "prompt_id": n, "finish_reason": "stop", "grade_reason": "equal"}
        for n in (2, 1, 3)
    ]  # fmt: skip
    samples[0]["estimates"] = {
        "left_out": 0,
        "tokens": ["<b>", "end"],
        "values": [0.1, 0.9],
        "advantages": [-1, 2],
    }
    (made / "samples" / "step_000003.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in samples)
    )
    return made


def shown(page: str) -> str:
    """What is on the page, without the data and scripts that it is drawn from."""
    return re.sub(r"<script.*?</script>", "", page, flags=re.S)


def order_of_samples(page: str) -> list[str]:
    return re.findall(r"class=\"problem\">p(\d)", shown(page))


def test_page_draws_curves_and_runs_nothing_of_a_response(tmp_path: Path, browse: Browse) -> None:
    run_dir = train_run(tmp_path)
    (run_dir / "profile").mkdir()
    traces = [
        "step_00002_rank0.json.gz",
        "step_00002_rank0.memory.pickle",
        "step_00002_rank1.json.gz",
    ]
    for name in traces:
        (run_dir / "profile" / name).touch()
    path = write_report([run_dir])
    page = browse(path.as_uri())
    assert "<title>my run</title>" in page
    assert re.findall(r'href="profile/([^"]*)"', shown(page)) == traces
    assert page.count('class="curve"') >= 2 and page.count('class="interval"') == 1
    assert re.search(r"train_infer_gap</b></td><td>1: 2</td>", page)
    assert "&lt;/script&gt;" in shown(page) and "<img" not in shown(page)
    assert "1.25" in shown(page), "the highest memory of a phase"
    tokens = re.findall(r'<span class="token" title="([^"]*)" style="background:rgba\((\d+)', page)
    assert tokens == [
        ("token 0: value 0.1, advantage -1", "220"),
        ("token 1: value 0.9, advantage 2", "37"),
    ]


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    text = write_report([train_run(tmp_path)]).read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name of SVG's, which nobody loads"
    assert not re.findall(
        r"<(?:link|img|iframe)\b|<script[^>]*\bsrc=",
        re.sub(r"<script.*?</script>", "", text, flags=re.S),
    )


@pytest.mark.parametrize(
    ("chosen", "order"),
    [
        pytest.param("", "213", marks=pytest.mark.full),
        ("sort=length&order=up", "123"),
        pytest.param("sort=reward", "132", marks=pytest.mark.full),
        ("grade=incorrect", "2"),
        pytest.param("shortest=15&longest=30", "23", marks=pytest.mark.full),
        ("lowest=0.4&highest=0.6", "2"),
        ("sort=value&order=up", "132"),
        pytest.param("sort=no", "213", marks=pytest.mark.full),
    ],
)
def test_samples_are_sorted_and_chosen(
    tmp_path: Path, browse: Browse, chosen: str, order: str
) -> None:
    path = write_report([train_run(tmp_path)])
    assert order_of_samples(browse(f"{path.as_uri()}#{chosen}")) == list(order)


def test_colours_bands_and_small_numbers_are_explained(tmp_path: Path, browse: Browse) -> None:
    run = train_run(tmp_path)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lengths = {f"response_length/{name}": n for name, n in (("mean", 9), ("min", 2), ("max", 30))}
    kl = (3e-15, 2e-14, 4e-4)
    rows = [json.loads(line) for line in lines]
    rows = [row | lengths | {"actor/train_infer_kl": at} for row, at in zip(rows, kl, strict=True)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = shown(browse(write_report([run]).as_uri()))
    panel = re.search(r"<h3>Response length.*?</section>", page, re.S)
    assert panel is not None and "shortest to longest" in panel[0]
    panel = re.search(r"<h3>KL to the rollout.*?</section>", page, re.S)
    assert panel is not None and "e-1" not in panel[0]
    (line,) = re.findall(r'd="([^"]*)" class="curve"', panel[0])
    heights = [float(point.split()[1]) for point in re.split("[ML]", line) if point]
    # Rounding lies on the lower edge of the axis
    assert heights[0] == heights[1] > heights[2] > 0
    (key,) = re.findall(r'<p class="hint key">(.*?)</p>', page)
    assert key.startswith("value of a token") and re.findall(r"> (-?[\d.]+) <", key) == [
        "0.1",
        "0.3",
        "0.5",
        "0.7",
        "0.9",
    ]


def test_several_runs_are_laid_over_each_other(tmp_path: Path, browse: Browse) -> None:
    runs = [train_run(tmp_path, name="first"), train_run(tmp_path, steps=5, name="second")]
    path = write_report(runs, tmp_path / "both.html")
    page = browse(path.as_uri())
    panel = re.search(r"<h3>Gradient|<h3>KL to the rollout.*?</section>", page, re.S)
    assert panel is not None and panel[0].count('class="curve"') == 2
    assert "first" in panel[0] and "second" in panel[0]


def with_evaluation(run: Path, correct: int) -> Path:
    """The run with a last evaluation of eight problems, `correct` of them right."""
    (run / "evaluation").mkdir()
    rows = [
        {"id": n, "problem": f"p{n}", "answer": "1", "response": "1", "correct": n < correct}
        for n in range(8)
    ]
    (run / "evaluation" / "step_000003_sums.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    (run / "evaluation.json").write_text(json.dumps({"step": 3, "sets": []}))
    return run


def test_runs_that_answered_same_problems_are_compared_in_pairs(
    tmp_path: Path, browse: Browse
) -> None:
    runs = [
        with_evaluation(train_run(tmp_path, name=name), correct)
        for name, correct in (("a", 2), ("b", 7))
    ]
    page = shown(browse(write_report(runs, tmp_path / "both.html").as_uri()))
    (table,) = re.findall(r'<section id="comparison">.*?</table>', page, re.S)
    assert (
        re.search(r"<td>a</td><td>b</td><td>sums</td>.*?\+0\.625 \[", table) and ">5 / 0<" in table
    )
    drawn = re.findall(r"<title>([^<]*): (\d)</title>", page.partition('id="comparison"')[2])[:9]
    assert [count for _, count in drawn] == list("000030005") and drawn[8][0] == "0.78 to 1.00"
    colours = re.findall(r'<p class="where"><svg class="swatch".*?stroke="(#\w+)"', page, re.S)
    assert len(set(colours)) == 2
    legends = re.findall(r'<div class="legend">.*?</div>', page, re.S)
    assert any('stroke-dasharray="6 3"' in legend for legend in legends), (
        "swatches are drawn as their lines"
    )
    assert "sums" not in shown(browse(write_report([runs[0]]).as_uri())), (
        "one run is compared with nothing"
    )


def test_episode_is_shown_by_turns_with_their_first_values(tmp_path: Path, browse: Browse) -> None:
    run = train_run(tmp_path)
    turns = [
        {"observed": False, "text": "<tool_call>add</tool_call>"},
        {"observed": True, "text": "42"},
    ]
    sample = {
        "problem": "p1",
        "answer": "42",
        "response": "42",
        "tokens": 2,
        "correct": True,
        "prompt_id": 1,
    }
    estimates = {"left_out": 0, "tokens": ["call", "42", "so"], "values": [0.25, None, 0.75]}
    rows = [{**sample, "turns": turns, "estimates": estimates}, {**sample, "turns": turns}]
    (run / "samples" / "step_000003.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    page = shown(browse(write_report([run]).as_uri()))
    markers = re.findall(r'<span class="turn">([^<]*)</span>', page)
    assert markers == ["turn 1, value 0.25", "observed", "turn 2, value 0.75", "turn 1", "observed"]
    assert "&lt;tool_call&gt;add&lt;/tool_call&gt;" in page


def test_an_evaluation_is_tables_and_responses(tmp_path: Path, browse: Browse) -> None:
    folder = tmp_path / "evaluated" / "evaluation"
    folder.mkdir(parents=True)
    interval = {"low": 0.4, "high": 0.6}
    result = {
        "name": "aime",
        "problems": 1,
        "samples": 4,
        "avg_at_k": 0.5,
        "pass_at_k": 0.9,
        "maj_at_k": 0.7,
        **interval,
    }
    result |= {"pass_at_k_interval": [0.8, 0.95], "response_length": 12.5, "truncated": 0.25}
    (folder.parent / "evaluation.json").write_text(json.dumps({"model": "m", "sets": [result]}))
    problem = {
        "id": "p7",
        "answer": "33",
        "samples": 4,
        "correct": 2,
        "majority": "33",
        "response_length": 12.5,
        "truncated": 1,
    }
    (folder / "aime_problems.jsonl").write_text(json.dumps(problem) + "\n")
    response = {
        "id": "p7",
        "problem": "p1",
        "answer": "33",
        "response": "so 33",
        "correct": True,
        "tokens": 3,
    }
    (folder / "aime.jsonl").write_text(json.dumps(response) + "\n")
    page = shown(browse(write_report([folder.parent]).as_uri()))
    assert (
        "0.500 [0.400, 0.600]" in page
        and "0.900 [0.800, 0.950]" in page
        and "2 / 4" in page
        and order_of_samples(page) == ["1"]
    )


def test_pictures_of_critic_and_plan_are_drawn(tmp_path: Path, browse: Browse) -> None:
    run = train_run(tmp_path)
    (run / "critic_probes").mkdir()
    points = [[0.1, 0.2], [0.5, 0.4], [0.9, 0.8]]
    (run / "critic_probes" / "probes.json").write_text(json.dumps({"points": points}))
    held = {"phase": "rollout", "parts": {"<b>kv": 2 << 30, "weights": 1 << 30}, "total": 3 << 30}
    plan = {
        "memory": {"usable_bytes_per_gpu": 4 << 30, "phases": [held]},
        "seconds": {"phases": {"rollout": 12.5, "offload": 0.0}},
    }
    (run / "plan.json").write_text(json.dumps(plan))
    page = shown(browse(write_report([run]).as_uri()))
    (section,) = re.findall(r'<section id="pictures">.*?(?=<section id="curves">)', page, re.S)
    assert section.count('class="chart picture') == 3 and "<b>kv" not in section
    scatter = section.partition("Values and what follows")[2].partition("</svg>")[0]
    assert scatter.count('opacity="0.35"') == 3
    widths = [float(w) for w in re.findall(r"<path d=\"M[\d. ]+h([\d.]+)v", section)]
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.01)
    assert "dashed: 4 GiB usable" in section and "12.5" in section and "offload" not in section
    (run / "plan.json").write_text('{"memory": []}')
    with pytest.raises(BadInput, match=r"plan.json or critic_probes/probes.json is not of this"):
        write_report([run])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    run = train_run(tmp_path)
    server = make_server([run], 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield run, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_run_that_goes_on_is_followed(served: tuple[Path, str], browse: Browse) -> None:
    run, address = served
    assert '<p class="where">3 steps' in browse(f"{address}/")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "accuracy/mean": 0.9}\n')
    with urllib.request.urlopen(f"{address}/data.json") as reply:
        assert json.load(reply)["runs"][0]["steps"] == 4
    assert '<p class="where">4 steps' in browse(f"{address}/")


def test_only_names_of_this_machine_are_answered(served: tuple[Path, str]) -> None:
    request = urllib.request.Request(
        f"{served[1]}/data.json", headers={"Host": "elsewhere.example:80"}
    )
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request)
    request.add_header("Host", "localhost")  # as browsers name port 80
    with urllib.request.urlopen(request) as reply:
        assert reply.status == 200
