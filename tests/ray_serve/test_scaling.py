"""Ray adds and removes replicas as the load asks for, by a Serve configuration file, while clients are served."""

import json

from cluster import HAPROXY, Cluster, Load, busy, wait_until

AUTOSCALING = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 3, "upscale_delay_s": 2, "downscale_delay_s": 4}
AUTOSCALING |= {"metrics_interval_s": 1, "look_back_period_s": 3}


def test_replicas_come_and_go_with_the_load_and_no_request_is_lost(tmp_path):
    deployment = {"name": "TextGeneration", "autoscaling_config": AUTOSCALING}
    application = {"name": "default", "import_path": "deploy.ray.app:app", "args": {"cpus": 0.5}, "deployments": [deployment]}
    config = tmp_path / "config.yaml"  # JSON is YAML, too
    config.write_text(json.dumps({"applications": [application]}))
    with Cluster(str(config), **HAPROXY) as cluster:
        [first] = cluster.wait_replicas(1)
        with Load(clients=1) as light:
            with Load(clients=8) as heavy:
                second = next(replica for replica in cluster.wait_replicas(2) if replica.port != first.port)
                wait_until(lambda: busy([second]) != [0], "a request for the new replica")
            [left] = cluster.wait_replicas(1)
            light.wait_for(4)
        assert light.failed == heavy.failed == []
        assert left.port in (first.port, second.port)
        cluster.stop()
