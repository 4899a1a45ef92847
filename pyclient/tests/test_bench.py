"""The one form in which every bench reports; what they measure is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from bench import attach, busy, serve, ttft  # noqa: E402
from bench._report import Case, Report  # noqa: E402

KEYS = ["name", "value", "unit", "limit", "ratio", "spread"]


def form(benchmark: str, text: str) -> dict[str, dict]:
    """The cases by name of what a bench wrote."""
    whole = json.loads(text)
    assert whole["benchmark"] == benchmark
    assert whole["cases"]
    for case in whole["cases"]:
        assert list(case) == KEYS
        assert case["name"] and case["unit"]
        assert isinstance(case["value"], float)
        assert {type(case[key]) for key in ("limit", "ratio", "spread")} in ({float}, {type(None)})
    cases = {case["name"]: case for case in whole["cases"]}
    assert len(cases) == len(whole["cases"])
    return cases


def printed(report: Report, capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    assert report.finish() == 0
    out, err = capsys.readouterr()
    cases = form(report.benchmark, out)
    assert out.count("\n") == 1
    assert all(name in err for name in cases)
    return cases


def test_report_pairs_rounds():
    """The numbers are those of TestBenchRounds in sidecar/cmd/lookaside."""
    report = Report("x")
    report.rounds("five", "us", [10, 30, 24, 8, 60], [10, 10, 20, 5, 40])  # 1, 3, 1.2, 1.6, 1.5
    report.rounds("one", "us", [123456.7], 1000)
    report.rounds("free", "us", [3, 1, 2])
    assert report.cases == [
        Case("five", 24, "us", 10, 2.4, 0.4),
        Case("one", 123460, "us", 1000, 123.46, 0),
        Case("free", 2, "us", None, None, None),
    ]
    with pytest.raises(ValueError):
        report.rounds("unpaired", "us", [1, 2], [1])
    with pytest.raises(ValueError):
        report.add("half", 1, "us", limit=2, ratio=0.5)


def test_report_is_last_on_stdout_and_stamped_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    report = Report("x")
    report.rounds("limited", "us", [1, 2], [2, 2])
    report.add("free", 3, "us")
    path = tmp_path / "x.json"
    assert report.finish(path) == 0
    out, err = capsys.readouterr()
    assert set(form("x", out)) == {"limited", "free"}
    assert out.count("\n") == 1 and "limited" in err
    written = json.loads(path.read_text())
    assert written.keys() == {"benchmark", "cases", "machine", "commit", "time"}
    assert written["cases"] == json.loads(out)["cases"]


def test_report_stamps_what_the_command_wrote(tmp_path: Path):
    path = tmp_path / "x.json"
    path.write_text('{"benchmark": "x", "cases": []}')
    subprocess.run([sys.executable, "-m", "bench._report", str(path)], cwd=REPO, check=True)
    written = json.loads(path.read_text())
    assert written.keys() == {"benchmark", "cases", "machine", "commit", "time"}
    assert written["machine"]["cores"] > 0


@pytest.mark.parametrize(
    ("name", "options", "cases"),
    [
        ("copy", ["--bytes=33554432", "--rounds=2"], 20),
        ("tiering", ["--blocks=4", "--rounds=2", "--lookup=32", "--calls=2"], 9),
        (
            "lookup",
            ["--pages=8192", "--rounds=2", "--pairs=3", "--tail=20", "--copy-threads=1"],
            13,
        ),
    ],
)
def test_bench_in_small(name: str, options: list[str], cases: int):
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", *options],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = form(name, done.stdout)
    assert len(found) == cases
    assert all(case["limit"] is not None for case in found.values())


@pytest.mark.parametrize(("kind", "limit"), [("hugetlb", 20.0), ("thp", 20.0), ("memfd", None)])
def test_attach_promises_only_huge_pages(
    kind: str, limit: float | None, capsys: pytest.CaptureFixture[str]
):
    second, bare = printed(attach.figures(kind, [10.0, 12.0], [9.0]), capsys).values()
    assert second["limit"] == limit
    assert bare["limit"] is None


def test_ttft_pairs_rounds(capsys: pytest.CaptureFixture[str]):
    seconds = {
        "cold.plain": [1.0, 2.0, 4.0],
        "cold.connector": [1.1, 2.0, 4.0],
        "hit.local_plain": [0.1, 0.2, 0.1],
        "hit.local_connector": [0.11, 0.22, 0.11],
        "hit.lookaside": [0.12, 0.22, 0.12],
    }
    shared = {
        name: tuple(case[key] for key in ("limit", "ratio", "spread"))
        for name, case in printed(ttft.figures(seconds), capsys).items()
    }
    assert shared == {
        "cold.plain": (None, None, None),
        "cold.connector": pytest.approx((2.0, 1.0, 0.05)),
        "hit.local_plain": (None, None, None),
        "hit.local_connector": pytest.approx((0.1, 1.1, 0.0)),
        "hit.lookaside": pytest.approx((0.1, 1.2, 0.05)),
    }
    for fault in ("killed", "stopped"):
        seconds |= {f"{fault}.plain": [1.0], f"{fault}.connector": [1.01], f"{fault}.extra": [0.01]}
    cases = printed(ttft.figures(seconds), capsys)
    for fault in ("killed", "stopped"):
        assert (cases[f"{fault}.extra"]["limit"], cases[f"{fault}.extra"]["ratio"]) == (0.05, 0.2)
        assert cases[f"{fault}.plain"]["limit"] is None
    seconds |= {"disk.computed": [4.0, 4.0], "disk.arena": [0.2, 0.2], "disk.disk": [0.4, 0.4]}
    seconds |= {"disk.missed": [0.0, 1.0, 0.0]}
    cases = printed(ttft.figures(seconds), capsys)
    assert cases["disk.missed"]["value"] == 1
    assert [cases[f"disk.{name}"]["ratio"] for name in ("arena", "disk", "over_arena")] == [
        0.05,
        0.1,
        2.0,
    ]


def test_busy_counts_steps_by_a_streams_tokens():
    times = [1.0, 2.0, 3.0, 4.0]
    assert busy.steps_between(times, 1.5, 2.99) == 2  # the token of the same step came after
    assert busy.steps_between(times, 1.5, 3.01) == 2  # or before
    assert busy.steps_between(times, 0.5, 4.2) == 4
    assert busy.steps_between(times, 2.9, 2.95) == 1


def test_busy_counts_the_tokens_of_a_line():
    assert busy.tokens_in(b'data: {"choices": [{"token_ids": [5, 6]}]}\n') == 2
    assert busy.tokens_in(b'data: {"choices": [{"token_ids": null}]}\n') == 0
    assert busy.tokens_in(b"\n") == busy.tokens_in(b"data: [DONE]\n") == 0
    with pytest.raises(RuntimeError, match="no room"):
        busy.tokens_in(b'data: {"error": "no room"}\n')


def test_busy_pairs_sides(capsys: pytest.CaptureFixture[str]):
    series = {
        "hit.4.500": {"connector": [0.2, 0.4], "plain": [0.1, 0.4]},
        "steps.hit.4.500": {"connector": [2.0, 3.0], "plain": [2.0, 2.0]},
        "streams.4": {"connector": [99.0], "plain": [100.0]},
    }
    ours = {"calls.4": [0.5, 1.5], "in_step.4": [8.0, 6.0]}
    cases = printed(busy.figures(series, ours, 1, 2), capsys)
    assert [(case["unit"], case["ratio"]) for case in cases.values()] == [
        ("s", 1.2),
        ("steps", 1.25),
        ("1/s", 0.99),
        ("%", None),
        ("hits", None),
        ("hits", None),
        ("prompts", None),
    ]


def test_serve_pairs_sides_and_judges_goals(capsys: pytest.CaptureFixture[str]):
    series = {
        "cold.turns": {
            "plain": [serve.Load(2.0, 0.5, 1.0, 0.0, 0.0)],
            "connector": [serve.Load(2.0, 0.5, 1.0, 0.0, 0.0)],
        },
        "prefix": {
            "plain": [serve.Load(2.0, 0.5, 1.0, 50.0, 200.0)],
            "connector": [serve.Load(6.0, 0.2, 0.6, 200.0, 200.0)],
            "offloading": [serve.Load(4.0, 0.4, 0.5, 200.0, 200.0)],
        },
    }
    series["turns"] = series["prefix"]
    report = serve.figures(series)
    cases = printed(report, capsys)
    assert {
        name: (case["unit"], case["ratio"])
        for name, case in cases.items()
        if name.startswith("prefix")
    } == {
        "prefix.throughput": ("1/s", 3.0),
        "prefix.throughput.over_offloading": ("1/s", 1.5),
        "prefix.ttft_p50": ("s", 0.4),
        "prefix.ttft_p50.over_offloading": ("s", 0.5),
        "prefix.ttft_p99": ("s", 0.6),
        "prefix.ttft_p99.over_offloading": ("s", 1.2),
        "prefix.hit_tokens.plain": ("tokens", 0.25),
        "prefix.hit_tokens.connector": ("tokens", 1.0),
        "prefix.hit_tokens.offloading": ("tokens", 1.0),
    }
    assert "cold.turns.throughput.over_offloading" not in cases
    assert cases["cold.turns.hit_tokens.connector"]["limit"] is None  # there is nothing to find
    assert [line.rsplit(" ", 1)[1] for line in serve.goals(report)] == ["met", "missed"] * 2


def test_serve_knows_what_can_be_found_of_a_conversation():
    conversation = serve.Conversation(seed=1)
    first = list(conversation.history)
    assert (len(first), conversation.held) == (2048, 0)
    conversation.grow([7] * 32)
    assert conversation.held == 2048  # of 2,048 + 31 tokens, whole blocks
    assert conversation.history[: 2048 + 32] == first + [7] * 32
    assert len(conversation.history) == 2304
    conversation.grow([7] * 200)
    assert conversation.held == 2432  # of 2,304 + 199


def test_serve_finds_why_a_server_has_not_started():
    log = """(APIServer pid=1) WARNING [system_utils.py:255] errors like `OSError: [Errno 24] files`
(Worker pid=2) ERROR 11-23 14:05:25 [multiproc_executor.py:1063]     raise Exception(
(Worker pid=2) ERROR 11-23 14:05:25 [multiproc_executor.py:1063] Exception: only on GPUs
RuntimeError: Engine core initialization failed. See root cause above.
"""
    assert serve.first_error(log) == "Exception: only on GPUs"
    assert serve.first_error(log.splitlines()[-1]).startswith("RuntimeError: Engine core")
    assert serve.first_error("killed") == "see its log:\nkilled"
