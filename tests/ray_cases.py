"""A Ray cluster of three nodes on this machine, with its token authentication on."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STORE = 100 * 2**20  # bytes of a node's object store
ROOT = Path(__file__).parent.parent
SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),  # of workers
    "OMP_WAIT_POLICY": "PASSIVE",
}


class Nodes:
    """The cluster, its address, and the nodes beside its head."""

    def __init__(self, count: int, folder: str) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False, "temp_dir": folder}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.others = [self.add() for _ in range(count - 1)]

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, **settings: object) -> object:
        return self.cluster.add_node(num_cpus=1, object_store_memory=STORE, **settings)

    def kill(self, place: int = 0) -> None:
        """A node ends with all that runs on it, and is told to nobody."""
        self.cluster.remove_node(self.others.pop(place), allow_graceful=False)

    def end(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()


@contextmanager
def cluster(count: int = 3) -> Iterator[Nodes]:
    """Nodes of one CPU each, which are gone afterwards; the settings are those of this process meanwhile."""
    folder = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")  # sockets allow no long paths
    settings = {**SETTINGS, "RAY_TMPDIR": folder.name}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    _read_settings()
    nodes = None
    try:
        (Path(folder.name) / "ray").mkdir()  # where Ray notes the address, and expects a folder to be
        nodes = Nodes(count, folder.name)
        yield nodes
    finally:
        if nodes is not None:
            nodes.end()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        _read_settings()
        folder.cleanup()


def _read_settings() -> None:
    """Ray reads them once, when it is imported."""
    from ray._raylet import AuthenticationTokenLoader, Config

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
