"""Clusters of several raylets on this machine."""

import pytest

# It sets Ray's token, which Ray reads once: before any test connects.
from benchmarks.local_cluster import Cluster


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory):
    """A cluster of three machines with a core each, shared by the tests of a file."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), nodes=3)
    yield cluster
    cluster.stop()


@pytest.fixture
def make_cluster(tmp_path):
    """Makes clusters of a test's own, whose machines it may kill."""
    made = []

    def make(**options):
        made.append(Cluster(tmp_path / f"cluster{len(made)}", **options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.stop()
