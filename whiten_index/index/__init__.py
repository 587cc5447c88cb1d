"""FAISS: factories, the transforms inside the file, the published bundle. The home of faiss."""

from whiten_index.index.bundle import Bundle, Rescorer, maps_by_default, open_bundle
from whiten_index.index.choice import (
    AUTO,
    LEAST_WORK,
    TARGET_RECALL,
    FactoryChoice,
    choose_factory,
    parse_bytes,
)
from whiten_index.index.documents import Documents, write_documents
from whiten_index.index.factory import (
    coarse_centroids,
    inner_index,
    inner_of,
    nprobe,
    peer_index,
    search_with,
    share_centroids,
    wrap,
)
from whiten_index.index.gpu import DEVICES, Placed, gpu_name, place, require_device
from whiten_index.index.library import describe_faiss, load_faiss, set_threads
from whiten_index.index.on_disk import IVF_DATA, kind_on_disk
from whiten_index.index.pages import give_back
from whiten_index.index.rotation import gains_by_rotation, rotation_for
from whiten_index.index.sizes import IndexBytes, expected_bytes, measured_bytes
from whiten_index.index.spilled import SpilledLists, gather
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
from whiten_index.index.versions import (
    DOCUMENTS,
    FORMAT_VERSION,
    INDEX,
    KIND,
    MOMENTS,
    WHITENING,
    find_version,
    next_version,
    publish,
    read_fields,
    set_current,
    tidy,
    vector_bytes,
    write_index,
)

__all__ = [
    "AUTO",
    "DEVICES",
    "DOCUMENTS",
    "FORMAT_VERSION",
    "INDEX",
    "IVF_DATA",
    "KIND",
    "LEAST_WORK",
    "MOMENTS",
    "TARGET_RECALL",
    "WHITENING",
    "Bundle",
    "Documents",
    "FactoryChoice",
    "IndexBytes",
    "OperatingPoint",
    "Placed",
    "Rescorer",
    "SpilledLists",
    "StreamedCodes",
    "Transforms",
    "choose_factory",
    "coarse_centroids",
    "describe_faiss",
    "exact_neighbours",
    "expected_bytes",
    "find_version",
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
    "maps_by_default",
    "measured_bytes",
    "next_version",
    "nprobe",
    "open_bundle",
    "parse_bytes",
    "peer_index",
    "place",
    "publish",
    "read_fields",
    "recall_of",
    "require_device",
    "require_training_rows",
    "rotation_for",
    "search_with",
    "set_current",
    "set_threads",
    "share_centroids",
    "tidy",
    "too_few_rows",
    "train",
    "training_rows",
    "truth_of_rows",
    "tune",
    "tune_candidates",
    "vector_bytes",
    "wrap",
    "write_documents",
    "write_index",
]
