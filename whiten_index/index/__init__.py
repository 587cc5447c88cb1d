"""FAISS: factories, the transforms inside the file, the published bundle. The home of faiss."""

from whiten_index.index.carried import CarriedCodes
from whiten_index.index.carriers import why_not_carried
from whiten_index.index.choice import (
    AUTO,
    LEAST_WORK,
    TARGET_RECALL,
    FactoryChoice,
    choose_factory,
    parse_bytes,
)
from whiten_index.index.documents import Documents, write_documents
from whiten_index.index.examine import Examined, examine
from whiten_index.index.factory import (
    inner_index,
    inner_of,
    nprobe,
    peer_index,
    search_with,
    wrap,
)
from whiten_index.index.gpu import DEVICES, Placed, gpu_name, place, require_device
from whiten_index.index.library import describe_faiss, load_faiss, set_threads
from whiten_index.index.on_disk import IVF_DATA, kind_on_disk
from whiten_index.index.pages import give_back
from whiten_index.index.rotation import gains_by_rotation, rotation_for
from whiten_index.index.sizes import IndexBytes, expected_bytes, measured_bytes
from whiten_index.index.spilled import PARTS, SpilledLists, gather
from whiten_index.index.streamed import StreamedCodes
from whiten_index.index.training import (
    least_training_rows,
    require_training_rows,
    too_few_rows,
    train,
    training_rows,
)
from whiten_index.index.transforms import Transforms
from whiten_index.index.tuning import (
    OperatingPoint,
    exact_neighbours,
    has_parameters,
    is_exact,
    recall_of,
    truth_of_rows,
    tune,
    tune_candidates,
)

__all__ = [
    "AUTO",
    "DEVICES",
    "IVF_DATA",
    "LEAST_WORK",
    "PARTS",
    "TARGET_RECALL",
    "CarriedCodes",
    "Documents",
    "Examined",
    "FactoryChoice",
    "IndexBytes",
    "OperatingPoint",
    "Placed",
    "SpilledLists",
    "StreamedCodes",
    "Transforms",
    "choose_factory",
    "describe_faiss",
    "exact_neighbours",
    "examine",
    "expected_bytes",
    "gains_by_rotation",
    "gather",
    "give_back",
    "gpu_name",
    "has_parameters",
    "inner_index",
    "inner_of",
    "is_exact",
    "kind_on_disk",
    "least_training_rows",
    "load_faiss",
    "measured_bytes",
    "nprobe",
    "parse_bytes",
    "peer_index",
    "place",
    "recall_of",
    "require_device",
    "require_training_rows",
    "rotation_for",
    "search_with",
    "set_threads",
    "too_few_rows",
    "train",
    "training_rows",
    "truth_of_rows",
    "tune",
    "tune_candidates",
    "why_not_carried",
    "wrap",
    "write_documents",
]
