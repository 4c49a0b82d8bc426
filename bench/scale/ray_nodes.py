"""Nodes of a Ray cluster, all on this machine, in a process of their own.

    python -m bench.scale.ray_nodes [{"cpus": 2}, {"cpus": 2, "env": {"NAME": "value"}}]

prints the address of the cluster when its nodes are there. The first is its head. A line on the
standard input, such as `10.0.0.1 (a1b2c3)`, kills the node whose id begins so, as a power cut does,
and is answered by a line; the end of the input ends all.
"""

import json
import os
import socket
import sys
from typing import Any

VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "100",
    "RAY_worker_niceness": "0",
}
"""By default Ray makes its workers nicer by 15, and what they start."""
PORTS = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port")
STORE_BYTES = 100_000_000


def main(nodes: list[dict[str, Any]]) -> None:
    """Start the nodes, then kill those that are named."""
    os.environ |= VARIABLES  # before Ray is imported
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        started = [cluster.add_node(**_arguments(node)) for node in nodes]
        print(cluster.address, flush=True)
        for line in sys.stdin:
            start_of_id = line.partition("(")[2].strip(")\n")
            (node,) = [node for node in started if node.node_id.startswith(start_of_id)]
            cluster.remove_node(node, allow_graceful=False)
            print("killed", flush=True)
    finally:
        cluster.shutdown()


def _arguments(node: dict[str, Any]) -> dict[str, Any]:
    """Ports are given, for a raylet waits but a moment until its agents have chosen some."""
    own = {
        "num_cpus": node["cpus"],
        "env_vars": node.get("env", {}),
        "object_store_memory": STORE_BYTES,
        "include_dashboard": False,
        "include_log_monitor": False,
    }
    return own | {name: _free_port() for name in PORTS}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
