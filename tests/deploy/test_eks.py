"""The cluster for EKS, and what may be added to one, have what a release of the chart asks for."""

import yaml
from manifests import DEPLOY, VERSIONS, find, invalid, read, release

from models.neuron.plan import INSTANCES

(CLUSTER,) = read("eks/cluster.yaml")
GROUPS = {group["name"]: group for group in CLUSTER["managedNodeGroups"]}
GIB = 1 << 30


def server_pod():
    return find(release("inf2"), "Deployment")["spec"]["template"]["spec"]


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
    (storage,) = read("eks/storageclass.yaml")
    assert invalid(storage) is None
    assert storage["provisioner"] == "ebs.csi.aws.com" and "aws-ebs-csi-driver" in addons
    assert storage["metadata"]["annotations"]["storageclass.kubernetes.io/is-default-class"] == "true"
    assert storage["parameters"]["encrypted"] == "true"


def test_nodes_of_karpenter_have_what_the_pods_ask_for_on_encrypted_disks():
    documents = read("eks/karpenter.yaml")
    assert [invalid(document) for document in documents] == [None, None]
    pool, machines = find(documents, "NodePool")["spec"], find(documents, "EC2NodeClass")
    node = pool["template"]["spec"]
    assert node["nodeClassRef"]["name"] == machines["metadata"]["name"]
    assert all(disk["ebs"]["encrypted"] for disk in machines["spec"]["blockDeviceMappings"])
    (worker,) = find(read("ray/rayservice.yaml"), "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    for pod in (server_pod(), worker["template"]["spec"]):
        assert [toleration["key"] for toleration in pod["tolerations"]] == [taint["key"] for taint in node["taints"]]
        assert pod["containers"][0]["resources"]["limits"].keys() >= pool["limits"].keys()


def test_the_class_on_efs_is_the_one_that_is_named_and_makes_folders_of_the_servers_user():
    (storage,) = read("eks/efs.yaml")
    assert invalid(storage) is None
    owner = [server_pod()["securityContext"][name] for name in ("runAsUser", "runAsGroup")]
    assert [int(storage["parameters"][name]) for name in ("uid", "gid")] == owner
    name = storage["metadata"]["name"]
    assert f"persistence.storageClass={name}," in (DEPLOY / "eks" / "README.md").read_text()
    assert find(read("ray/rayservice.yaml"), "PersistentVolumeClaim")["spec"]["storageClassName"] == name
