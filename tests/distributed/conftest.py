"""Clusters of several raylets on this machine."""

import pytest

# It sets Ray's token, which Ray reads once: before any test connects.
from benchmarks.local_cluster import Cluster


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    """A cluster of two machines with a core each, shared by the tests of a file.

    The last tests of a file kill machines; each makes up for those that are gone.
    """
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), nodes=2)
    yield cluster
    cluster.stop()


@pytest.fixture
def mortal(two_nodes):
    """The same cluster, whose machines the test may kill."""
    while len(two_nodes.nodes) < 2:
        two_nodes.add()
    return two_nodes
