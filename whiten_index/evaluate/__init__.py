"""How good embeddings and vectors are at what they are for: flows that read, encode, measure."""

from whiten_index.evaluate.config import EvalConfig
from whiten_index.evaluate.geometry import evaluate_geometry, read_geometry_sets
from whiten_index.evaluate.layers import evaluate_layers
from whiten_index.evaluate.retrieval import evaluate_retrieval
from whiten_index.evaluate.retrieval_config import RetrievalConfig
from whiten_index.evaluate.sts import evaluate_sts
from whiten_index.evaluate.transfer import evaluate_transfer

__all__ = [
    "EvalConfig",
    "RetrievalConfig",
    "evaluate_geometry",
    "evaluate_layers",
    "evaluate_retrieval",
    "evaluate_sts",
    "evaluate_transfer",
    "read_geometry_sets",
]
