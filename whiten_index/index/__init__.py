"""FAISS: choose, build, tune and search an index. The only importer of faiss."""

from whiten_index.index.build_distributed import build_faiss_index
from whiten_index.index.build_local import CodeReuse, IndexBuildResult
from whiten_index.index.choice import (
    AUTO,
    TARGET_RECALL,
    FactoryChoice,
    IndexPlan,
    choose_factory,
    parse_bytes,
)
from whiten_index.index.code_reuse import why_not_reusable
from whiten_index.index.exact import exact_neighbours
from whiten_index.index.examine import Examined, examine
from whiten_index.index.factory import inner_index, inner_of, is_exact, is_graph, nprobe, peer_index
from whiten_index.index.gpu import DEVICES, DeviceIndex, gpu_name, require_device
from whiten_index.index.library import INDEX, describe_faiss, load_faiss, set_threads, write_index
from whiten_index.index.ondisk_ivf import IVF_DATA
from whiten_index.index.sizes import IndexBytes, expected_bytes, measured_bytes
from whiten_index.index.training import require_training_rows, train
from whiten_index.index.transforms import Transforms, is_lossy, wrap
from whiten_index.index.tuning import OperatingPoint, has_parameters

__all__ = [
    "AUTO",
    "DEVICES",
    "INDEX",
    "IVF_DATA",
    "TARGET_RECALL",
    "CodeReuse",
    "DeviceIndex",
    "Examined",
    "FactoryChoice",
    "IndexBuildResult",
    "IndexBytes",
    "IndexPlan",
    "OperatingPoint",
    "Transforms",
    "build_faiss_index",
    "choose_factory",
    "describe_faiss",
    "exact_neighbours",
    "examine",
    "expected_bytes",
    "gpu_name",
    "has_parameters",
    "inner_index",
    "inner_of",
    "is_exact",
    "is_graph",
    "is_lossy",
    "load_faiss",
    "measured_bytes",
    "nprobe",
    "parse_bytes",
    "peer_index",
    "require_device",
    "require_training_rows",
    "set_threads",
    "train",
    "why_not_reusable",
    "wrap",
    "write_index",
]
