"""Run the nodes of a Ray cluster on this machine, as a program of its own.

    python -m bench.scale.ray_nodes [{"cpus": 2}, {"cpus": 2, "env": {"NAME": "value"}}]

The argument has an entry for each node; the first node is the head. Once all nodes run, the program
prints the cluster's address. A line on stdin, such as `10.0.0.1 (a1b2c3)`, kills the node whose id
begins with the text in parentheses, as a power cut would, and is answered by the line `killed`. The
end of stdin ends the cluster.
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
"""Environment variables of Ray: no statistics for its makers, patience with a loaded machine, and
no lower priority (by default workers, and the processes that they start, have a niceness of 15)."""
# Ports of a node's agents, as Ray's arguments name them.
PORTS = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port")
STORE_BYTES = 100_000_000
"""Size of each node's object store, which only has to hold the files of a tiny policy."""


def main(nodes: list[dict[str, Any]]) -> None:
    """Start the nodes, then kill each node that a line on stdin names."""
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
    """Return Ray's arguments of a node.

    Ports are chosen here, because a raylet waits only briefly for its agents to choose theirs.
    """
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
