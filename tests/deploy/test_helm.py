"""What `helm install deploy/helm` sends is what the manifests send, and valid and safe with other values, too."""

import json
import re
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from manifests import IMAGE, OVERLAYS, VERSIONS, built, complaints, find, invalid, pod_templates, variables, window_s

import config
from run import HERE

CHART = HERE / "deploy" / "helm"
MODEL = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
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
    "claim": {"device": "inf2", "modelId": MODEL, "persistence": {"existingClaim": "models"}},
}


def helm(*arguments, values=None):
    command = [Path(sys.executable).parent / "helm", *arguments, "--values", "-"]
    return subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True, timeout=60)


def rendered(values, release="neuron-textgen", namespace="neuron-textgen"):
    done = helm("template", release, CHART, "--namespace", namespace, values=values)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def pod(documents):
    return find(documents, "Deployment")["spec"]["template"]["spec"]


def test_the_chart_is_what_helm_accepts_and_of_this_version():
    done = helm("lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout + done.stderr
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (config.VERSION, config.VERSION)
    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"


@pytest.mark.parametrize("device", OVERLAYS)
def test_the_objects_of_a_release_are_those_of_the_manifests(device):
    """But for the namespace, which helm makes by itself, the labels of the chart, and that it keeps the volume."""
    expected = {document["kind"]: document for document in deepcopy(built(device)) if document["kind"] != "Namespace"}
    documents = {document["kind"]: document for document in rendered(CASES[device])}
    for document in documents.values():
        labels = document["metadata"].pop("labels")
        assert labels["app.kubernetes.io/instance"] == "neuron-textgen"
    if "PersistentVolumeClaim" in documents:
        assert documents["PersistentVolumeClaim"]["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    for described in (documents, expected):  # the order of variables and volumes means nothing
        spec = pod([*described.values()])
        for named in (spec["containers"][0]["env"], spec["volumes"]):
            named.sort(key=lambda entry: entry["name"])
    assert documents == expected


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
    rules = (HERE / "deploy" / "prometheus-rules.yaml").read_text()
    assert find(documents, "PrometheusRule")["spec"] == yaml.safe_load(rules)
    dashboard = find(documents, "ConfigMap")["data"]["neuron-textgen.json"]
    assert json.loads(dashboard) == json.loads((HERE / "deploy" / "grafana-dashboard.json").read_text())
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
