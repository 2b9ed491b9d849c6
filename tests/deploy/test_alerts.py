"""The Grafana dashboard and the alert rules under deploy/ show metrics that exist, and Prometheus' own tool accepts them."""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from engine.metrics import Metrics
from run import HERE

RULES = HERE / "deploy" / "helm" / "prometheus-rules.yaml"
RULES_TEST = HERE / "tests" / "prometheus" / "rules_test.yaml"
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (apt install prometheus)")


def exposed():
    metrics = Metrics("")
    metrics.describe_model(2, 50, 60, "float32", None)
    metrics.series("startup_phase_seconds", "loading").set(1)
    return metrics.render().decode()


SERIES = set(re.findall(r"^(tgi_\w+)", exposed(), flags=re.MULTILINE))


def names_in(text):
    return set(re.findall(r"tgi_\w+", text))


def queries():
    dashboard = json.loads((HERE / "deploy" / "helm" / "grafana-dashboard.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_every_metric_is_on_the_dashboard_or_named_as_left_out():
    families = set(re.findall(r"^# TYPE (\w+) ", exposed(), flags=re.MULTILINE))
    suffix = r"(?:_bucket|_sum|_count|_total)?\{"
    shown = {name for name in families if re.search(rf"\b{name}{suffix}", "".join(queries()))}
    guide = (HERE / "docs" / "metrics.md").read_text()
    left_out = guide[guide.index("It leaves out") : guide.index("`deploy/helm/prometheus-rules.yaml` has")]
    assert set(re.findall(r"`(\w+)`", left_out)) == families - shown


def promtool(*arguments):
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)


def test_the_dashboard_and_the_alerts_are_about_metrics_that_exist():
    for text in (RULES.read_text(), "".join(queries())):
        assert names_in(text) and names_in(text) <= SERIES


def test_each_alert_has_a_test_in_which_it_fires():
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text())
    fires = re.findall(r"alertname: (\w+)\n +exp_alerts:\n +- exp_labels", RULES_TEST.read_text())
    assert alerts and set(alerts) == set(fires)


def test_the_command_of_the_guide_makes_a_rule_for_the_operator_of_the_same_groups():
    guide = (HERE / "docs" / "metrics.md").read_text()
    command = guide[guide.index("{ printf 'apiVersion") : guide.index(" | kubectl -n neuron-textgen apply -f -")]
    made = subprocess.run(["sh", "-c", command], cwd=HERE, capture_output=True, text=True, check=True).stdout
    rule = yaml.safe_load(made)
    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(RULES.read_text())


@needs_promtool
def test_prometheus_accepts_the_rules_and_they_fire_where_they_should():
    checked = promtool("check", "rules", RULES)
    assert checked.returncode == 0, checked.stderr
    tested = promtool("test", "rules", RULES_TEST)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@needs_promtool
def test_prometheus_accepts_the_queries_of_the_dashboard(tmp_path):
    rules = [{"record": "a", "expr": query.replace("$__rate_interval", "1m")} for query in queries()]
    (tmp_path / "rules.json").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML
    checked = promtool("check", "rules", "--lint=none", tmp_path / "rules.json")
    assert checked.returncode == 0, checked.stdout + checked.stderr
