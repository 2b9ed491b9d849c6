"""What the chart sends is valid and safe with any values, and the manifests are what it prints."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest
import yaml
from manifests import (
    CHART,
    DEPLOY,
    IMAGE,
    MODEL,
    VERSIONS,
    complaints,
    find,
    helm,
    invalid,
    pod_templates,
    read,
    rendered,
    variables,
    window_s,
)

import config

README = DEPLOY / "kubernetes" / "README.md"
MANIFESTS = README.parent / "manifests"
DIGEST = "sha256:" + 64 * "0"
EVERYTHING = {
    "device": "inf2",
    "modelId": MODEL,
    "settings": {"MAX_BATCH_SIZE": 8, "PAYLOAD_LIMIT": 2_000_000, "QUANTIZE": "int8", "JSON_OUTPUT": True},
    "secretName": "keys",
    "image": {"digest": DIGEST, "pullPolicy": "Always", "pullSecrets": ["registry"]},
    "replicas": 2,
    "gracefulTerminationTimeout": 300,
    "persistence": {"storageClass": "efs", "accessMode": "ReadWriteMany", "size": "200Gi"},
    "service": {"type": "LoadBalancer", "port": 8000, "annotations": {"a/b": "c"}},
    "ingress": {"enabled": True, "className": "alb", "host": "llm.example.com", "tlsSecretName": "certificate"},
    "gateway": {"parentRefs": [{"name": "public", "namespace": "gateways"}], "hostnames": ["llm.example.com"]},
    "podMonitor": True,
    "prometheusRule": True,
    "dashboard": True,
    "networkPolicy": {"namespaces": ["envoy"], "from": [{"ipBlock": {"cidr": "10.0.0.0/16"}}]},
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::123456789012:role/models"}},
    "nodeSelector": {"zone": "a"},
    "tolerations": [{"key": "team", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
}
CASES = {
    "cpu": {},
    "inf2": {"device": "inf2", "modelId": MODEL},
    "trn1": {"device": "trn1", "modelId": MODEL},
    "everything": EVERYTHING,
    "hpa": {"autoscaling": {"by": "hpa", "max": 9}},
    "keda": {"autoscaling": {"by": "keda", "min": 2}},
    "volume": {"persistence": {"size": "10Gi"}},
    "class": {"persistence": {"storageClass": "efs"}},
    "pool": {"gateway": {"parentRefs": [{"name": "public"}], "inferencePool": "my-pool"}},
    "picker": {"gateway": {"className": "eg", "endpointPicker": "my-picker"}},
    "claim": {"device": "inf2", "modelId": MODEL, "persistence": {"existingClaim": "models"}},
}


def pod(documents):
    return find(documents, "Deployment")["spec"]["template"]["spec"]


def test_the_chart_is_what_helm_accepts_and_of_this_version():
    done = helm("lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout + done.stderr
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (config.VERSION, config.VERSION)
    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"


def test_the_manifests_are_what_the_commands_of_the_readme_print(tmp_path):
    """To print them again, run these commands."""
    (commands,) = re.findall(r"^```sh\n(helm template .*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    copytree(DEPLOY, tmp_path / "deploy")
    printed = tmp_path / "deploy" / "kubernetes" / "manifests"
    for path in printed.iterdir():
        path.write_text("")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-ec", commands], cwd=tmp_path, env=os.environ | {"PATH": path}, check=True, timeout=60)
    texts = {path.name: path.read_text() for path in MANIFESTS.iterdir()}
    assert {path.name: path.read_text() for path in printed.iterdir()} == texts


def test_the_line_of_the_readme_makes_the_manifest_of_inferentia2_one_of_trainium():
    (command,) = re.findall(r"`(sed 's/\\\[inf2.*) \| kubectl apply -f -`", README.read_text())
    made = subprocess.run(command, shell=True, cwd=DEPLOY.parent, capture_output=True, text=True, check=True).stdout
    assert pod(list(yaml.safe_load_all(made)))["affinity"] == pod(rendered(CASES["trn1"]))["affinity"]


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_what_a_release_sends_is_valid_and_safe(values):
    for document in rendered(values, release="other", namespace="apps"):
        assert document["metadata"]["namespace"] == "apps"
        assert document["metadata"]["name"].startswith("other-neuron-textgen")
        for template in pod_templates(document):  # a digest is a version, too
            for container in template["spec"]["containers"]:
                container["image"] = container["image"].replace(f"{IMAGE}@{DIGEST}", f"{IMAGE}:{config.VERSION}")
        if document["kind"] != "PrometheusRule":  # tests/deploy/test_alerts.py
            assert invalid(document) is None
        assert list(complaints(document)) == []


def test_two_releases_in_a_namespace_have_nothing_in_common():
    both = [
        rendered({**EVERYTHING, "replicas": None, "autoscaling": {"by": "keda"}}, release) for release in ("first", "second")
    ]
    names = [{(document["kind"], document["metadata"]["name"]) for document in documents} for documents in both]
    assert not names[0] & names[1]
    for documents, release in zip(both, ("first", "second")):
        name = f"{release}-neuron-textgen"
        labels = {"app.kubernetes.io/name": name}
        assert find(documents, "Deployment")["spec"]["template"]["metadata"]["labels"] == labels
        assert find(documents, "Service")["spec"]["selector"] == labels
        selecting = ("Deployment", "PodDisruptionBudget", "PodMonitor")
        assert all(find(documents, kind)["spec"]["selector"] == {"matchLabels": labels} for kind in selecting)
        assert find(documents, "NetworkPolicy")["spec"]["podSelector"] == {"matchLabels": labels}
        spread = pod(documents)["topologySpreadConstraints"]
        assert [constraint["labelSelector"] for constraint in spread] == [{"matchLabels": labels}]
        assert find(documents, "HTTPRoute")["spec"]["rules"][0]["backendRefs"] == [{"name": name, "port": 8000}]
        (path,) = find(documents, "Ingress")["spec"]["rules"][0]["http"]["paths"]
        assert path["backend"]["service"]["name"] == name
        scaled = find(documents, "ScaledObject")["spec"]
        assert scaled["scaleTargetRef"]["name"] == name
        assert f'namespace="neuron-textgen",pod=~"{name}-.*"' in scaled["triggers"][0]["metadata"]["query"]


def test_every_value_reaches_what_it_is_about():
    documents = rendered(EVERYTHING, namespace="apps")
    spec, (server,) = pod(documents), pod(documents)["containers"]
    given = {"MAX_BATCH_SIZE": "8", "PAYLOAD_LIMIT": "2000000", "QUANTIZE": "int8", "JSON_OUTPUT": "true"}
    own = {"PORT": "8080", "GRACEFUL_TERMINATION_TIMEOUT": "300", "MODEL_ID": MODEL}
    assert variables(server) == given | own
    assert server["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert (server["image"], server["imagePullPolicy"]) == (f"{IMAGE}@{DIGEST}", "Always")
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert find(documents, "Deployment")["spec"]["replicas"] == 2
    assert find(documents, "Deployment")["spec"]["strategy"].get("type") != "Recreate", "the volume is for several nodes"
    assert server["lifecycle"]["preStop"]["sleep"]["seconds"] + 300 + 7 < spec["terminationGracePeriodSeconds"]
    claim = find(documents, "PersistentVolumeClaim")["spec"]
    assert (claim["storageClassName"], claim["accessModes"]) == ("efs", ["ReadWriteMany"])
    assert claim["resources"]["requests"]["storage"] == "200Gi"
    service = find(documents, "Service")
    assert (service["spec"]["type"], service["spec"]["ports"][0]["port"]) == ("LoadBalancer", 8000)
    assert service["metadata"]["annotations"] == {"a/b": "c"}
    ingress = find(documents, "Ingress")
    assert ingress["spec"]["rules"][0]["host"] == "llm.example.com"
    assert ingress["spec"]["tls"] == [{"secretName": "certificate", "hosts": ["llm.example.com"]}]
    assert "idle_timeout" in str(ingress["metadata"]["annotations"])
    route = find(documents, "HTTPRoute")["spec"]
    assert (route["parentRefs"], route["hostnames"]) == ([{"name": "public", "namespace": "gateways"}], ["llm.example.com"])
    assert route["rules"][0]["backendRefs"] == [{"name": "neuron-textgen", "port": 8000}]
    pool = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "my-pool"}
    assert find(rendered(CASES["pool"]), "HTTPRoute")["spec"]["rules"][0]["backendRefs"] == [pool]
    assert [find(documents, "PrometheusRule")["spec"]] == read("helm/prometheus-rules.yaml")
    dashboard = find(documents, "ConfigMap")["data"]["neuron-textgen.json"]
    assert json.loads(dashboard) == json.loads((CHART / "grafana-dashboard.json").read_text())
    namespaces, block = find(documents, "NetworkPolicy")["spec"]["ingress"][0]["from"]
    assert namespaces["namespaceSelector"]["matchExpressions"][0]["values"] == ["apps", "envoy"]
    assert block == {"ipBlock": {"cidr": "10.0.0.0/16"}}
    assert find(documents, "ServiceAccount")["metadata"]["annotations"] == EVERYTHING["serviceAccount"]["annotations"]
    assert spec["nodeSelector"] == {"zone": "a"}
    assert [toleration["key"] for toleration in spec["tolerations"]] == ["aws.amazon.com/neuron", "team"]
    assert spec["affinity"] == {"podAntiAffinity": {}}
    scaler = find(rendered(CASES["hpa"]), "HorizontalPodAutoscaler")["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (1, 9)
    assert find(rendered(CASES["keda"]), "ScaledObject")["spec"]["minReplicaCount"] == 2
    assert "PersistentVolumeClaim" not in [document["kind"] for document in rendered(CASES["claim"])]
    claims = [pod(rendered(CASES[name]))["volumes"][1] for name in ("volume", "class", "claim", "cpu")]
    assert [next(iter(volume.get("persistentVolumeClaim", {}).values()), None) for volume in claims] == [
        "neuron-textgen",
        "neuron-textgen",
        "models",
        None,
    ]
    probe = server["startupProbe"]
    assert window_s(probe) > 3600


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"modelID": "x"}, "modelID"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"settings": {"API_KEY": "secret"}}, "API_KEY"),
        ({"settings": {"PORT": 80}}, "PORT"),
        ({"device": "inf1", "modelId": "x"}, "device"),
        ({"device": "inf2"}, "modelId is needed"),
        ({"replicas": 2, "autoscaling": {"by": "hpa"}}, "replicas is a fixed number"),
        ({"gracefulTerminationTimeout": "long"}, "gracefulTerminationTimeout"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_by_name(values, named):
    done = helm("template", "a", CHART, values=values)
    assert done.returncode != 0 and named in done.stderr


def leaves(values, path=()):
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from leaves(value, (*path, name))
    else:
        yield ".".join(path)


def test_the_readme_describes_each_value():
    described = re.findall(r"`([\w.]+)`", "".join(re.findall(r"^\| (.*?) \|", (CHART / "README.md").read_text(), re.MULTILINE)))
    assert described == list(leaves(yaml.safe_load((CHART / "values.yaml").read_text())))
