"""Checks the dashboard and the alert rules: a real server has every metric and label that they name.

Where Prometheus is installed, its own ``promtool`` also parses the rules and fires them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import running_server

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "grafana"
DASHBOARD = json.loads((FOLDER / "continuum.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
CHARTS = [panel for panel in PANELS if panel["type"] != "row"]
RULES = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
EXPRESSIONS = [target["expr"] for panel in CHARTS for target in panel["targets"]]
ALERTS = [rule["expr"] for rule in RULES]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}

FROM_SCRAPING = frozenset({"job", "instance"})
"""Labels that Prometheus itself adds."""
OF_PROMETHEUS = frozenset({"up"})
"""Series that Prometheus itself adds."""
NO_METRIC = frozenset(
    {"sum", "max", "rate", "increase", "deriv", "histogram_quantile", "min_over_time", "by", "and"}
)
"""Other words of an expression."""
GRID_COLUMNS = 24
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "make"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


@dataclass(frozen=True, slots=True)
class Query:
    """The metrics and labels in a PromQL expression."""

    metrics: frozenset[str]
    labels: frozenset[tuple[str, str]]
    """Pairs of metric and label, of matchers and of groupings."""

    @classmethod
    def read(cls, expression: str) -> Query:
        bare = re.sub(r"\[[^\]]*\]", "", re.sub(r'"[^"]*"', '""', expression))
        matchers = re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", bare)
        outside = re.sub(r"\{[^}]*\}", "", bare)
        grouped = {
            label.strip() for labels in re.findall(r"by \(([^)]*)\)", outside) for label in labels.split(",")
        }
        words = set(re.findall(r"[a-zA-Z_:][\w:]*", re.sub(r"by \([^)]*\)", "", outside)))
        metrics = words - NO_METRIC
        matched = {
            (metric, label) for metric, text in matchers for label in re.findall(r"(\w+)\s*(?:=|!)", text)
        }
        return cls(
            frozenset(metrics), frozenset(matched | {(m, label) for m in metrics for label in grouped})
        )


class Page:
    """A server's /metrics: series, and the labels of each."""

    def __init__(self, text: str) -> None:
        self.labels: dict[str, set[str]] = {}
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.labels.setdefault(sample.name, set()).update(sample.labels)
                self.values[sample.name, tuple(sorted(sample.labels.items()))] = sample.value

    def total(self, name: str, **labels: str) -> float:
        """The sum over the series of this name that have these labels."""
        return sum(
            value
            for (each, has), value in self.values.items()
            if each == name and labels.items() <= dict(has).items()
        )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Metrics of a server that has served a job of three turns, refused a request and cleaned a prompt."""
    model = make_model_folder(tmp_path_factory.mktemp("model") / "qwen3", max_position_embeddings=2048)
    flags = (
        "--num-gpu-blocks-override",
        "300",
        "--max-num-queued-reqs",
        "4",
        "--kv-offloading-size",
        "0.01",
        "--ttl-rule",
        "fixed",
        "--speculative-config",
        '{"method": "suffix"}',
    )
    with running_server(model, *flags) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        serve_a_job(http)
        refuse_one_beside_another(http)
        yield Page(http.get("/metrics").text)


def refuse_one_beside_another(http: httpx.Client) -> None:
    """Sends a request that is refused because another one runs."""
    long = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=long) as running:
        lines = running.iter_lines()
        next(lines)
        refused = http.post("/v1/completions", json={"prompt": "a", "n": 9, "max_tokens": 1})
        assert refused.status_code == 503
        assert list(lines)[-2] == "data: [DONE]"


def serve_a_job(http: httpx.Client) -> None:
    forced = http.post("/tokenize", json={"prompt": CALL + "<|im_end|>", "add_special_tokens": False}).json()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "x-anthropic-billing-header: cc_version=1; cch=abc;\nYou fix bugs."},
        {"role": "user", "content": "The tests fail. " * 20},
    ]
    for turn in range(3):
        body = {"messages": messages, "tools": TOOLS, "job_id": "j", "replay_token_ids": forced["tokens"]}
        answer = http.post("/v1/chat/completions", json={**body, "is_last_step": turn == 2})
        message = answer.json()["choices"][0]["message"]
        messages += [
            message,
            {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "1"},
        ]
    # The core's counts of the last turn come with its next step.
    http.post("/v1/completions", json={"prompt": "once more", "max_tokens": 2}).raise_for_status()


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *ALERTS])
def test_every_metric_and_label_is_there(expression: str, page: Page) -> None:
    """A real server's page has each metric and label of the expression."""
    query = Query.read(expression)
    assert query.metrics
    for metric in query.metrics - OF_PROMETHEUS:
        assert metric in page.labels, metric
    for metric, label in query.labels:
        if metric not in OF_PROMETHEUS:
            assert label in page.labels[metric] | FROM_SCRAPING, f"{metric} has no label {label}"


def test_a_wrong_name_would_be_found(page: Page) -> None:
    """The test above parses expressions like Prometheus: it would find each kind of mistake."""
    query = Query.read('sum by (cause, le) (rate(continuum:no_such_total{cuase="x"}[5m])) / up > 0')
    assert query.metrics == {"continuum:no_such_total", "up"}
    assert {label for metric, label in query.labels if metric != "up"} == {"cause", "le", "cuase"}
    assert "continuum:no_such_total" not in page.labels


def test_what_an_operator_asks_of_jobs_is_counted(page: Page) -> None:
    """A job of three turns that its client finished is counted: pins, waits and predictions."""
    assert page.total("continuum:jobs") == 0
    assert page.total("continuum:jobs_that_fit") > 0
    assert page.total("continuum:jobs_ended_total", outcome="finished") == 1
    assert page.total("continuum:job_turns_sum") == 3
    assert page.total("continuum:job_duration_seconds_count") == 1
    assert page.total("continuum:job_duration_seconds_sum") > 0
    assert page.total("continuum:job_queue_seconds_count") == 1
    assert page.total("continuum:job_queue_seconds_sum") < page.total("continuum:job_duration_seconds_sum")
    assert page.total("continuum:pin_held_seconds_count", cause="handed_over") == 2
    assert page.total("continuum:pins_ended_total", cause="handed_over") == 2
    assert page.total("continuum:gap_prediction_error_seconds_count") == 1  # Nothing was known of the first.
    assert page.total("vllm:request_success_total", finished_reason="error") == 0


def test_the_dashboard_plots_what_is_asked_of_it() -> None:
    """Charts show jobs, pins by outcome, hit rate, preemptions, waits, KV, recomputed tokens and errors."""
    plotted = set().union(*(Query.read(expression).metrics for expression in EXPRESSIONS))
    assert plotted >= {
        "continuum:jobs",
        "continuum:jobs_that_fit",
        "continuum:jobs_ended_total",
        "continuum:pins_ended_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:request_queue_time_seconds_bucket",
        "vllm:kv_cache_usage_perc",
        "continuum:host_kv_usage_perc",
        "continuum:recomputed_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_requests_waiting",
        "vllm:request_success_total",
    }
    waits = [e for e in EXPRESSIONS if "request_queue_time" in e]
    assert [re.findall(r"quantile\((0\.\d+)", expression) for expression in waits] == [
        ["0.5"],
        ["0.95"],
        ["0.99"],
    ]


def test_grafana_can_read_the_dashboard() -> None:
    """The dashboard has what the classic model needs: version, unique ids, panels that do not overlap."""
    assert DASHBOARD["schemaVersion"] >= 36  # data sources are objects since that version
    assert DASHBOARD["uid"]
    assert DASHBOARD["title"]
    assert "id" not in DASHBOARD  # A database id would bind the dashboard to one Grafana.
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    assert all(
        panel["title"] and panel["gridPos"]["x"] + panel["gridPos"]["w"] <= GRID_COLUMNS for panel in PANELS
    )
    for one, other in combinations((panel["gridPos"] for panel in PANELS), 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
    for panel in CHARTS:
        assert panel["description"], panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0


def test_the_dashboard_fits_any_grafana() -> None:
    """The data source is a variable, as are job, server and model; no other variable is used."""
    assert VARIABLES["datasource"]["type"] == "datasource"
    for part in (*CHARTS, *(target for panel in CHARTS for target in panel["targets"])):
        assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    used = {name for expression in EXPRESSIONS for name in re.findall(r"\$(\w+)", expression)}
    assert used <= VARIABLES.keys() | {"__rate_interval"}
    for name in VARIABLES.keys() - {"datasource"}:
        assert VARIABLES[name]["definition"].startswith("label_values(vllm:num_requests_running")


def test_rules_watch_the_job_that_is_scraped() -> None:
    """The rules name the example's job; every rule says what has happened, and where."""
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = (config["job_name"] for config in scraped["scrape_configs"])
    assert scraped["rule_files"] == ["alerts.yml"]
    for rule in RULES:
        assert f'job="{job}"' in rule["expr"], rule["alert"]
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("critical", "warning")


FIRED = """
rule_files: [RULES]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: 'up{job="continuum",instance="s"}'
        values: '1x5 0x10'
      - series: 'vllm:num_requests_waiting{job="continuum",instance="s"}'
        values: '0x10 5+5x40'
      - series: 'continuum:pins_ended_total{job="continuum",instance="s",cause="revoked"}'
        values: '0+5x60'
      - series: 'continuum:pins_ended_total{job="continuum",instance="well",cause="handed_over"}'
        values: '0+9x60'
      - series: 'continuum:pins_ended_total{job="continuum",instance="well",cause="revoked"}'
        values: '0+5x60'
      - series: 'vllm:request_success_total{job="continuum",instance="s",finished_reason="stop"}'
        values: '0+100x60'
      - series: 'vllm:request_success_total{job="continuum",instance="s",finished_reason="error"}'
        values: '0x20 0+5x40'
      - series: 'vllm:admission_rejections_total{job="continuum",instance="s",reason="r"}'
        values: '0x20 0+1x40'
    alert_rule_test: []
    promql_expr_test:
      - expr: 'count by (alertname, instance) (ALERTS{alertstate="firing"})'
        eval_time: 3m
        exp_samples: []
      - expr: 'count by (alertname) (ALERTS{alertstate="firing",alertname="ContinuumDown"})'
        eval_time: 10m
        exp_samples: [{labels: '{alertname="ContinuumDown"}', value: 1}]
      - expr: 'count by (alertname, instance) (ALERTS{alertstate="firing",alertname!="ContinuumDown"})'
        eval_time: 45m
        exp_samples:
          - {labels: '{alertname="ContinuumPinsRevoked",instance="s"}', value: 1}
          - {labels: '{alertname="ContinuumQueueGrowing",instance="s"}', value: 1}
          - {labels: '{alertname="ContinuumRefusing",instance="s"}', value: 1}
          - {labels: '{alertname="ContinuumRequestsFail",instance="s"}', value: 1}
"""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Prometheus)")
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """In Prometheus itself a healthy server fires no alert, and each alert fires when its problem lasts."""
    made = tmp_path / "fired.yml"
    made.write_text(FIRED.replace("RULES", str(FOLDER / "alerts.yml")))
    for command in (["check", "config", str(FOLDER / "prometheus.yml")], ["test", "rules", str(made)]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
