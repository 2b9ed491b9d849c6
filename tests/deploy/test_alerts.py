"""The Grafana dashboard and the alert rules under deploy/ show metrics that exist, and Prometheus' own tool accepts them."""

import json
import re
import shutil
import subprocess

import pytest

from engine.metrics import Metrics
from run import HERE

RULES = HERE / "deploy" / "prometheus-rules.yaml"
RULES_TEST = HERE / "tests" / "prometheus" / "rules_test.yaml"
NOT_ON_THE_DASHBOARD = {
    "request_skipped_tokens",  # always 0
    "steps",  # as batch_inference_count
    "batch_inference_count",
    "batch_inference_success",
    "batch_inference_duration",  # as batch_forward_duration and batch_decode_duration together
    "batch_filter_duration",
    "batch_current_size",  # as slots_busy
    "batch_next_size",
    "batch_concat",
    "request_validation_duration",
    "request_inference_duration",
    "request_mean_time_per_token_duration",
    "request_max_new_tokens",
}

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (apt install prometheus)")


def exposed():
    metrics = Metrics()
    metrics.set_limits(2, 50, 60)
    metrics.series("boot_phase_seconds", "loading").set(1)
    return metrics.render().decode()


SERIES = set(re.findall(r"^(tgi_\w+)", exposed(), flags=re.MULTILINE))
METRICS = set(re.findall(r"^# TYPE (\w+)", exposed(), flags=re.MULTILINE))


def names_in(text):
    return set(re.findall(r"tgi_\w+", text))


def queries():
    dashboard = json.loads((HERE / "deploy" / "grafana-dashboard.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def promtool(*arguments):
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)


def test_the_dashboard_shows_every_metric_but_those_that_repeat_another():
    names = set().union(*map(names_in, queries()))
    assert names <= SERIES
    shown = {name if name in METRICS else re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    assert METRICS - shown == {f"tgi_{name}" for name in NOT_ON_THE_DASHBOARD}


def test_the_alerts_are_about_metrics_that_exist():
    names = names_in(RULES.read_text())
    assert names and names <= SERIES


def test_each_alert_has_a_test_in_which_it_fires():
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text())
    fires = re.findall(r"alertname: (\w+)\n +exp_alerts:\n +- exp_labels", RULES_TEST.read_text())
    assert len(alerts) == 5 and set(alerts) == set(fires)


@needs_promtool
def test_prometheus_accepts_the_rules_and_they_fire_where_they_should():
    checked = promtool("check", "rules", RULES)
    assert checked.returncode == 0 and "5 rules found" in checked.stdout, checked.stderr
    tested = promtool("test", "rules", RULES_TEST)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@needs_promtool
def test_prometheus_accepts_the_queries_of_the_dashboard(tmp_path):
    rules = [{"record": "a", "expr": query.replace("$__rate_interval", "1m")} for query in queries()]
    (tmp_path / "rules.json").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML
    checked = promtool("check", "rules", "--lint=none", tmp_path / "rules.json")
    assert checked.returncode == 0, checked.stdout + checked.stderr
