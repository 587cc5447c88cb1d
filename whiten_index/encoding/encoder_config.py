"""Options of an encoder."""

import re
from importlib.util import find_spec
from typing import Literal, get_args

from whiten_index.artifacts.files import list_folder
from whiten_index.errors import ConfigError, require_installed
from whiten_index.options import MODEL, RESOURCES, flag_of, option, options_of, schema
from whiten_index.paths import require_text, shown

DEFAULT_MODEL = "all-MiniLM-L6-v2"
EMBEDDED = "embedded"  # revision of the default model in its package
PoolingName = Literal[
    "mean", "cls", "max", "last", "weightedmean", "mean_sqrt_len_tokens", "first-last-avg"
]
DtypeName = Literal["float32", "bfloat16", "float16"]
BackendName = Literal["torch", "openvino", "onnx"]
POOLINGS: tuple[str, ...] = get_args(PoolingName)
_MOST_THREADS = 1024
_BACKEND_HELP = (
    "Library that computes embeddings; openvino, on CPUs, takes less time for one query, and onnx "
    "needs no torch."
)

REMOTE = "openai:"
# Options of a model of this machine, and of one behind an API.
_LOCAL = (
    "revision", "trust_remote_code", "pooling", "layers", "max_length", "dtype", "device",
    "backend", "local_files_only", "code_revision",
)  # fmt: skip
_OF_API = ("base_url", "dimensions", "input_types", "price", "max_cost")


@schema
class ModelOptions:
    """Options that name a model, and allow its code."""

    model: str | None = option(
        "Hub name, local folder, or openai:NAME behind an API.",
        MODEL,
        default=None,
        shown="all-MiniLM-L6-v2, if installed",
    )
    revision: str | None = option("Commit or branch on the hub.", MODEL, default=None)
    trust_remote_code: bool = option(
        "Run Python code that comes with the model.", MODEL, default=False
    )


@schema
class OpeningOptions:
    """Options of how the encoder of an index is opened."""

    model: str | None = option(
        "Where the index's own encoder is now, if it moved.", MODEL, default=None
    )
    trust_remote_code: bool = option(
        "Run Python code that comes with the model.", MODEL, default=False
    )
    device: str = option("Device of the encoder.", RESOURCES, default="auto")
    backend: BackendName = option(_BACKEND_HELP, RESOURCES, default="torch")
    threads: int | None = option(
        "CPU threads of encoder and FAISS.", RESOURCES, default=None, ge=1, le=_MOST_THREADS
    )


@schema
class ApiOptions:
    """Options of requests to an API, which embeddings do not depend on."""

    base_url: str | None = option(
        "Endpoint of an API that speaks OpenAI's protocol, such as http://tei:8080/v1.",
        MODEL,
        default=None,
        shown="OPENAI_BASE_URL, else OpenAI's",
    )
    price: float | None = option(
        "Price of a million tokens of the API, in any currency.", MODEL, default=None, ge=0
    )
    max_cost: float | None = option(
        "Money that requests may cost; needs --price.", MODEL, default=None, ge=0
    )


@schema
class EncoderConfig(ApiOptions, ModelOptions):
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
    dtype: DtypeName = option("Type that the model computes in.", MODEL, default="float32")
    device: str = option(
        "auto (every GPU), cpu, cuda:1, mps, or several: cuda:0,cuda:1.", RESOURCES, default="auto"
    )
    backend: BackendName = option(_BACKEND_HELP, RESOURCES, default="torch")
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
    dimensions: int | None = option(
        "Width to ask an API for, of a model that has several.", MODEL, default=None, ge=1
    )
    input_types: tuple[str, ...] | None = option(
        "The API's input_type of documents and of queries, such as passage,query.",
        MODEL,
        default=None,
        commas=True,
    )

    @property
    def onnx(self) -> bool:
        """True if ONNX Runtime computes: if asked to, and where torch is not installed."""
        return self.backend == "onnx" or find_spec("torch") is None

    @property
    def remote(self) -> bool:
        """True of a model behind an API."""
        return (self.model or "").startswith(REMOTE)

    def __post_init__(self) -> None:
        for name in ("document_prompt", "query_prompt"):
            require_text(getattr(self, name) or "", flag_of(name))
        self._require_place()
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

    def _require_place(self) -> None:
        """Refuse options of a model of this machine for one behind an API, and the reverse."""
        options = {each.name: each for each in options_of(EncoderConfig)}
        names = _LOCAL if self.remote else _OF_API
        given = [options[n].flag for n in names if getattr(self, n) != options[n].default]
        if given and self.remote:
            raise ConfigError(
                f"{' and '.join(given)} cannot apply to {self.model}, which runs behind an API; "
                "leave it out"
            )
        if given:
            raise ConfigError(
                f"{' and '.join(given)} is for a model behind an API; name one with --model "
                f"{REMOTE}NAME, or leave it out"
            )
        if self.base_url is not None and not re.match(r"https?://[^/]", self.base_url):
            raise ConfigError(
                f"--base-url {shown(self.base_url)} is no address; write one as http://tei:8080/v1"
            )
        if self.model == REMOTE:
            raise ConfigError(f"--model {REMOTE} names no model; write {REMOTE}NAME")
        if self.max_cost is not None and self.price is None:
            raise ConfigError("--max-cost needs the price of a million tokens; add --price")
        if self.input_types is not None and len(self.input_types) != 2:
            raise ConfigError(
                "--input-types takes that of documents and that of queries, such as passage,query"
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
