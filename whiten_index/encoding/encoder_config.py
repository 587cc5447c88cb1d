"""Options of an encoder."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from whiten_index.artifacts.files import list_folder
from whiten_index.errors import ConfigError
from whiten_index.options import MODEL, RESOURCES, Option, schema
from whiten_index.paths import require_text

DEFAULT_MODEL = "all-MiniLM-L6-v2"
PoolingName = Literal[
    "mean", "cls", "max", "last", "weightedmean", "mean_sqrt_len_tokens", "first-last-avg"
]
DtypeName = Literal["float32", "bfloat16", "float16"]
POOLINGS: tuple[str, ...] = get_args(PoolingName)
DTYPES: tuple[str, ...] = get_args(DtypeName)
_MOST_THREADS = 1024


@schema
class ModelOptions:
    """Options that name a model, and allow its code."""

    model: Annotated[
        str | None,
        Option("Hub name or local folder.", MODEL, default="all-MiniLM-L6-v2, if installed"),
    ] = None
    revision: Annotated[str | None, Option("Commit or branch on the hub.", MODEL)] = None
    trust_remote_code: Annotated[
        bool, Option("Run Python code that comes with the model.", MODEL)
    ] = False


@schema
class EncoderConfig(ModelOptions):
    """Options of an encoder; ``None`` takes the setting of the model's folder.

    Raises:
        ConfigError: a value is out of bounds, or two options exclude each other.

    Examples:
        >>> EncoderConfig(pooling="mean", max_length=256).dtype
        'float32'
    """

    pooling: Annotated[
        PoolingName | None,
        Option(
            "Pooling of token states; first-last-avg averages the first and the last layer.",
            MODEL,
            default="the model's own, else mean",
        ),
    ] = None
    layers: Annotated[
        tuple[int, ...] | None,
        Option(
            "Hidden states to average, 0 = embedding layer, -1 = last: e.g. 1,12.",
            MODEL,
            default="the last",
            commas=True,
        ),
    ] = None
    max_length: Annotated[
        int | None,
        Field(ge=3),
        Option(
            "Tokens of a text, special tokens included; longer texts are cut and counted.",
            MODEL,
            default="the model's own",
        ),
    ] = None
    dtype: Annotated[DtypeName, Option("Type that the model computes in.", MODEL)] = "float32"
    device: Annotated[
        str, Option("auto (every GPU), cpu, cuda:1, mps, or several: cuda:0,cuda:1.", RESOURCES)
    ] = "auto"
    threads: Annotated[
        int | None,
        Field(ge=1, le=_MOST_THREADS),
        Option("CPU threads of the encoder and of FAISS.", RESOURCES, default="torch's own"),
    ] = None
    document_prompt: Annotated[
        str | None, Option("Text put before every document.", MODEL, default="the model's own")
    ] = None
    query_prompt: Annotated[
        str | None, Option("Text put before every query.", MODEL, default="the model's own")
    ] = None
    document_prompt_name: Annotated[
        str | None, Option("Name of the model's prompt for documents, instead of its text.", MODEL)
    ] = None
    query_prompt_name: Annotated[
        str | None, Option("Name of the model's prompt for queries, instead of its text.", MODEL)
    ] = None
    local_files_only: Annotated[
        bool, Option("Use a model of this machine; fetch nothing from the hub.", MODEL)
    ] = False
    code_revision: Annotated[
        str | None,
        Option("Commit or branch of code that the model takes from another repository.", MODEL),
    ] = None

    def __post_init__(self) -> None:
        for option in ("document_prompt", "query_prompt"):
            flag = f"--{option.replace('_', '-')}"
            require_text(getattr(self, option) or "", flag)
            if None not in (getattr(self, option), getattr(self, f"{option}_name")):
                raise ConfigError(f"{flag} and {flag}-name were both given; leave one out")
        if self.pooling == "first-last-avg" and self.layers is not None:
            raise ConfigError("first-last-avg chooses the layers itself; leave out --layers")
        if self.layers is not None and not self.layers:
            raise ConfigError("--layers names no layer; write numbers such as 1,12 or 0,-1")


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
