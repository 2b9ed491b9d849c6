"""The cluster for EKS has what a release of the chart asks for."""

import kubernetes_validate
import yaml
from manifests import VERSIONS, built, find

from models.neuron.plan import INSTANCES
from run import HERE

FOLDER = HERE / "deploy" / "eks"
CLUSTER = yaml.safe_load((FOLDER / "cluster.yaml").read_text())
GROUPS = {group["name"]: group for group in CLUSTER["managedNodeGroups"]}
GIB = 1 << 30


def server_pod():
    return find(built("inf2"), "Deployment")["spec"]["template"]["spec"]


def test_a_node_takes_a_replica_and_keeps_other_pods_off():
    machine = INSTANCES[GROUPS["inf2"]["instanceType"]]
    pod = server_pod()
    limits = pod["containers"][0]["resources"]["limits"]
    assert int(limits["memory"].removesuffix("Gi")) * GIB < machine.host_bytes
    assert 2 * int(limits["aws.amazon.com/neuron"]) <= machine.cores
    taints = [taint["key"] for taint in GROUPS["inf2"]["taints"]]
    assert taints == [toleration["key"] for toleration in pod["tolerations"]]
    assert "taints" not in GROUPS["system"], "the cluster's own pods need a node"


def test_the_version_of_kubernetes_is_one_that_the_manifests_are_validated_for():
    oldest, newest = (tuple(map(int, version.split("."))) for version in VERSIONS)
    assert oldest <= tuple(map(int, CLUSTER["metadata"]["version"].split("."))) <= newest


def test_policies_have_an_effect_disks_are_encrypted_and_volumes_are_found():
    addons = {addon["name"]: addon for addon in CLUSTER["addons"]}
    assert yaml.safe_load(addons["vpc-cni"]["configurationValues"]) == {"enableNetworkPolicy": "true"}
    assert {"coredns", "kube-proxy", "eks-pod-identity-agent"} < addons.keys(), "naming one leaves out the defaults"
    assert all(group["volumeEncrypted"] and group["disableIMDSv1"] for group in GROUPS.values())
    storage = yaml.safe_load((FOLDER / "storageclass.yaml").read_text())
    for version in VERSIONS:
        kubernetes_validate.validate(storage, version, strict=True)
    assert storage["provisioner"] == "ebs.csi.aws.com" and "aws-ebs-csi-driver" in addons
    assert storage["metadata"]["annotations"]["storageclass.kubernetes.io/is-default-class"] == "true"
    assert storage["parameters"]["encrypted"] == "true"
