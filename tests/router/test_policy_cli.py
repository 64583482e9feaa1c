"""`kvlift policy`, on real files, and the policies as the router's YAML holds them."""

from __future__ import annotations

import csv
import json
import math
import random

import pytest
import typer
import yaml
from pydantic import TypeAdapter
from typer.testing import CliRunner

from policies import AnyPolicy
from router.config import load_config
from router.errors import ConfigError
from router.policy_cli import policy

SMALL, LARGE = "tiny-chat-v0.1", "huge-chat-preview"


@pytest.fixture
def run(tmp_path):
    """Runs `kvlift policy calibrate`, its results in the test's folder."""
    app = typer.Typer()
    app.add_typer(policy, name="policy")

    def calibrate(*words):
        out = tmp_path / "made" / "policy.json"
        return CliRunner().invoke(app, ["policy", "calibrate", *map(str, words), "--out", str(out)]), out

    return calibrate


def outcomes(count=400):
    """Hard requests have low scores, and the large model solves more of them."""
    chance = random.Random(5)
    rows = []
    for _ in range(count):
        hard = chance.gauss(0, 1)
        small, large = (chance.random() < 1 / (1 + math.exp(slope * hard - ease)) for slope, ease in ((2, 0.5), (1, 2)))
        rows.append((-abs(chance.gauss(0.3 + 0.2 * hard, 0.1)), small, large))
    return rows


def write(path, header, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


@pytest.fixture
def plain(tmp_path):
    return write(tmp_path / "o.csv", ["score", "small_right", "large_right"], outcomes())


def test_a_rate_is_fitted_shown_and_written(run, plain):
    said, out = run(plain, "--rate", 0.25, "--cost-ratio", 0.2)
    assert said.exit_code == 0, said.output
    found = json.loads(out.read_text())
    threshold = found["chosen"]["threshold"]
    assert sum(score < threshold for score, *_ in outcomes()) == 100
    assert found["chosen"]["rate"] == 0.25 and found["chosen"]["cost"] == pytest.approx(0.45)
    assert found["escalates"] == "score < threshold"
    assert found["break_even_rate"] == 0.8
    assert 0.5 < found["area"] < found["best_area"]
    assert len(found["curve"]) == 401
    assert repr(threshold) in said.output and "25.00%" in said.output
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_quality_is_fitted(run, plain):
    said, out = run(plain, "--quality", 0.75)
    found = json.loads(out.read_text())
    assert said.exit_code == 0 and found["goal"] == {"rate": None, "quality": 0.75}
    assert found["chosen"]["quality"] >= 0.75


def test_routellms_outcomes_with_win_rates_from_a_second_file(run, plain, tmp_path):
    """The same outcomes in RouteLLM's shape, its scores rising with difficulty, give the same choice."""
    _, out = run(plain, "--rate", 0.25)
    plainly = json.loads(out.read_text())
    header = ["prompt", SMALL, LARGE, f"{SMALL}_response", f"{LARGE}_response"]
    rows = [(f"What is\n{n}, plainly?", s, large, 'a "b"', "c, d") for n, (_, s, large) in enumerate(outcomes())]
    responses = write(tmp_path / "responses.csv", header, rows)
    scored = [(-score, row[0]) for (score, *_), row in zip(outcomes(), rows, strict=True)]
    scores = write(tmp_path / "scores.csv", ["win_rate", "prompt"], reversed(scored))
    models = ["--small-column", SMALL, "--large-column", LARGE]
    said, out = run(responses, *models, "--scores", scores, "--higher", "hard", "--rate", 0.25)
    assert said.exit_code == 0, said.output
    found = json.loads(out.read_text())
    assert found["escalates"] == "score > threshold"
    assert found["chosen"] == {**plainly["chosen"], "threshold": -plainly["chosen"]["threshold"]}
    assert found["area"] == plainly["area"]
    named, _ = run(responses, *models)
    assert named.exit_code == 1 and "--score-column" in named.output and "--scores" in named.output


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("", [], "o.csv: empty"),
        ("score,small_right,large_right\n1,true,maybe\n", [], "o.csv:2: large_right is 'maybe'"),
        ("score,small_right,large_right\n1,true,true\n2,true,true\n", [], "o.csv: one class only"),
        ("score,small_right,large_right\n1,true,true\n2,false,true\n", ["--quality", "0.5", "--rate", "1"], "give one"),
        ("score,small_right,large_right\n1,true,true\n2,false,true\n", ["--score-column", "x"], "no column 'x'"),
    ],
)
def test_what_is_wrong_is_said_on_one_line_and_nothing_is_written(run, tmp_path, text, words, said):
    file = tmp_path / "o.csv"
    file.write_text(text)
    result, out = run(file, *words)
    assert result.exit_code == 1 and said in result.output and result.output.count("\n") == 1
    assert not out.exists()


def test_a_file_that_is_not_text_or_not_there_is_named(run, tmp_path):
    file = tmp_path / "o.csv"
    file.write_bytes(b"\xff\xfe\x00")
    assert "o.csv: cannot be read" in run(file)[0].output
    assert run(tmp_path / "none.csv")[0].exit_code == 2


def test_a_byte_order_mark_is_no_part_of_a_column(run, plain):
    plain.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert run(plain)[0].exit_code == 0


EVERY_PARAMETER = """\
tiers:
  - {name: small, served: s, address: "http://127.0.0.1:1"}
  - {name: large, served: l, address: "http://127.0.0.1:2"}
default_policy: all-of-them
policies:
  all-of-them:
    method: shadow
    share: 0.1
    seed: 7
    of:
      method: any
      of:
        - {method: length, characters: 9000, tokens: 2000, to: large}
        - {method: keywords, words: [theorem]}
        - {method: regex, pattern: "[0-9]{9}"}
        - {method: tools}
        - {method: json_asked}
        - {method: language, known: [latin, greek]}
        - {method: answer_regex, pattern: "unsure"}
        - {method: refusal, phrases: [not possible], within: 50}
        - {method: empty}
        - {method: invalid_json}
        - {method: invalid_tool_call}
        - {method: loop, ngram: 8, repeats: 5, tokens: 40}
        - {method: tier_busy, tier: small, in_flight: 8, queued: 4}
        - method: all
          of:
            - {method: target_rate, rate: 0.3, window: 100, start: 30, of: {method: min_window, window: 4}}
            - {method: tier_ready, tier: large, in_flight: 9, queued: 5}
            - {method: budget, share: 0.4, calls: 3}
        - method: weighted
          threshold: 0.7
          votes:
            - {weight: 2, policy: {method: hybrid, weights: {entropy: 1, margin: 2}, window: 6, alternatives: 3}}
            - {policy: {method: entropy, alternatives: 4, threshold: 0.9}}
            - weight: 3
              policy:
                {method: self_verify, ask: "Sure?", yes_words: [sure], no_words: [nope], alternatives: 8, threshold: 1}
"""


def test_the_yaml_may_say_every_parameter_of_every_method(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(EVERY_PARAMETER)
    config = load_config(file)
    chosen = config.policies["all-of-them"]
    asked = yaml.safe_load(EVERY_PARAMETER)["policies"]["all-of-them"]
    assert contains(chosen.model_dump(mode="json"), asked)
    assert chosen.tiers == {"small", "large"}
    assert (chosen.top_logprobs, chosen.question, chosen.question_logprobs) == (4, "Sure?", 8)
    schema = TypeAdapter(AnyPolicy).json_schema()["$defs"].values()
    keys = {key for part in schema for key in part["properties"]} - {"method"}
    assert [key for key in keys if f"{key}:" not in EVERY_PARAMETER] == []


def contains(whole, part):
    """True where all that `part` says is in `whole` too."""
    if isinstance(part, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part


def test_a_fault_deep_in_a_policy_is_named_with_line_and_key(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(EVERY_PARAMETER.replace("calls: 3", "callz: 3"))
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).replace(f"{tmp_path}/", "") == (
        "c.yaml:30: policies.all-of-them.of.of.13.of.2.callz: unknown key; did you mean 'calls'?"
    )


def test_a_combined_policy_decides_in_the_router(build):
    unsure = {"method": "min_window", "threshold": -1.0, "window": 1}
    refused = {"method": "all", "of": [unsure, {"method": "never"}]}
    house = build(
        policies={
            "floor": {"method": "any", "of": [{"method": "tools"}, {"method": "avg_logprob", "threshold": -9}, unsure]},
            "vetoed": refused,
        },
        default_policy="floor",
    )
    house.small.script.logprob = -5.0
    assert house.ask().headers["x-kvlift-reason"] == "low_confidence"
    assert house.ask(model="vetoed").headers["x-kvlift-reason"] == "never"
    house.small.script.logprob = -0.1
    assert house.ask().headers["x-kvlift-reason"] == "confident"
    straight = house.ask(tools=[{"type": "function", "function": {"name": "f"}}])
    assert straight.headers["x-kvlift-reason"] == "tools"
    assert len(house.small.calls) == 3
