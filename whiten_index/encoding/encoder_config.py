"""Options of an encoder."""

from typing import Literal, get_args

from whiten_index.artifacts.files import list_folder
from whiten_index.errors import ConfigError, require_installed
from whiten_index.options import MODEL, RESOURCES, flag_of, option, schema
from whiten_index.paths import require_text

DEFAULT_MODEL = "all-MiniLM-L6-v2"
PoolingName = Literal[
    "mean", "cls", "max", "last", "weightedmean", "mean_sqrt_len_tokens", "first-last-avg"
]
DtypeName = Literal["float32", "bfloat16", "float16", "int8"]
BackendName = Literal["torch", "openvino"]
POOLINGS: tuple[str, ...] = get_args(PoolingName)
DTYPES: tuple[str, ...] = get_args(DtypeName)
_MOST_THREADS = 1024
BACKEND_HELP = "Library that computes embeddings; openvino, on CPUs, takes less time for one query."


@schema
class ModelOptions:
    """Options that name a model, and allow its code."""

    model: str | None = option(
        "Hub name or local folder.", MODEL, default=None, shown="all-MiniLM-L6-v2, if installed"
    )
    revision: str | None = option("Commit or branch on the hub.", MODEL, default=None)
    trust_remote_code: bool = option(
        "Run Python code that comes with the model.", MODEL, default=False
    )


@schema
class EncoderConfig(ModelOptions):
    """Options of an encoder; ``None`` takes the setting of the model's folder.

    Raises:
        ConfigError: a value is out of bounds, or two options exclude each other.

    Examples:
        >>> EncoderConfig(pooling="mean", max_length=256).dtype
        'float32'
    """

    pooling: PoolingName | None = option(
        "Pooling of token states; first-last-avg averages the first and the last layer.",
        MODEL,
        default=None,
        shown="the model's own, else mean",
    )
    layers: tuple[int, ...] | None = option(
        "Hidden states to average, 0 = embedding layer, -1 = last: e.g. 1,12.",
        MODEL,
        default=None,
        shown="the last",
        commas=True,
    )
    max_length: int | None = option(
        "Tokens of a text, special tokens included; longer texts are cut and counted.",
        MODEL,
        default=None,
        ge=3,
        shown="the model's own",
    )
    dtype: DtypeName = option(
        "Type that the model computes in; int8 is for CPUs.", MODEL, default="float32"
    )
    device: str = option(
        "auto (every GPU), cpu, cuda:1, mps, or several: cuda:0,cuda:1.", RESOURCES, default="auto"
    )
    backend: BackendName = option(BACKEND_HELP, RESOURCES, default="torch")
    threads: int | None = option(
        "CPU threads of the encoder and of FAISS.",
        RESOURCES,
        default=None,
        ge=1,
        le=_MOST_THREADS,
        shown="torch's own",
    )
    document_prompt: str | None = option(
        "Text put before every document.", MODEL, default=None, shown="the model's own"
    )
    query_prompt: str | None = option(
        "Text put before every query.", MODEL, default=None, shown="the model's own"
    )
    local_files_only: bool = option(
        "Use a model of this machine; fetch nothing from the hub.", MODEL, default=False
    )
    code_revision: str | None = option(
        "Commit or branch of code that the model takes from another repository.",
        MODEL,
        default=None,
    )

    def __post_init__(self) -> None:
        for name in ("document_prompt", "query_prompt"):
            require_text(getattr(self, name) or "", flag_of(name))
        if self.pooling == "first-last-avg" and self.layers is not None:
            raise ConfigError("first-last-avg chooses the layers itself; leave out --layers")
        if self.layers is not None and not self.layers:
            raise ConfigError("--layers names no layer; write numbers such as 1,12 or 0,-1")
        if self.backend == "openvino":
            require_installed("openvino", by="--backend openvino", extra="openvino")
            if self.dtype not in ("float32", "bfloat16"):
                raise ConfigError(
                    f"--backend openvino computes in float32 or bfloat16, not in {self.dtype}; use "
                    "--backend torch"
                )


def chosen_devices(asked: str) -> tuple[str, ...]:
    """Return the devices that encode side by side, one process each where there are several."""
    names = tuple(name.strip() for name in asked.split(","))
    if "" in names or (len(names) > 1 and "auto" in names):
        raise ConfigError(
            f"--device {asked!r} is not understood; use auto, cpu, cuda, cuda:1, or several with "
            "commas between, such as cuda:0,cuda:1"
        )
    if names == ("auto",) and list_folder("/dev", "nvidia[0-9]*"):
        import torch

        count = torch.cuda.device_count()
        return tuple(f"cuda:{number}" for number in range(count)) or names
    return names
