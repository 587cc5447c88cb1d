"""Hidden states of a Transformer on a CPU by OpenVINO, which answers one query sooner than torch.

torch exports the loaded model as a graph for any number and length of texts, and OpenVINO compiles
it; files for OpenVINO or ONNX that come with a model are not read. A batch has all threads and
texts of one length, since with padding some models give NaN (windows of attention that see padding
alone). An embedding may depend on its batch by rounding.
"""

import threading
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from whiten_index.encoding.products import TRIAL_ERRORS
from whiten_index.errors import EncoderError, first_line

_LONGEST_TRIAL = 1024  # tokens; branches of models by length are for sliding windows


class OpenVinoStates:
    """States of a model by OpenVINO, called as the module that it was made from.

    Threads may share it; what it returns is overwritten by the next call in the same thread.
    """

    def __init__(self, states: nn.Module, dtype: str, *, vocabulary: int, longest: int) -> None:
        """Compile ``states``: token ids (n, t) to a list of states (n, t, d).

        Args:
            states: of a float32 model in evaluation mode.
            dtype: float32 or bfloat16, where the processor has it.
            vocabulary: tokens that the model knows.
            longest: tokens of the longest text.

        Raises:
            EncoderError: the model cannot be converted, or gives other states than torch.
        """
        self._local = threading.local()
        try:
            self._compiled, self.dtype = _compile(states, dtype)
            sizes = (1, 1), (3, 5), (1, min(longest, _LONGEST_TRIAL))
            errors = torch.cat([_errors(states, self, vocabulary, *size) for size in sizes])
        except Exception as error:
            # torch, OpenVINO and code of models raise all sorts of errors here.
            raise EncoderError(
                f"OpenVINO cannot run this model ({type(error).__name__}: {first_line(error)}); "
                "use --backend torch"
            ) from error
        # NaN is no agreement either.
        if not (worst := float(errors.max())) <= TRIAL_ERRORS[getattr(torch, self.dtype)]:
            raise EncoderError(
                f"OpenVINO gives other states than torch for this model, by {worst:.2g}; use "
                "--backend torch"
            )

    def __call__(self, input_ids: Tensor, attention_mask: None = None) -> list[Tensor]:  # noqa: ARG002
        """Return the states (n, t, d) of token ids (n, t) of texts of one length."""
        # A request is for one thread.
        if (request := getattr(self._local, "request", None)) is None:
            request = self._local.request = self._compiled.create_infer_request()
        found = request.infer([input_ids.numpy()], share_inputs=True, share_outputs=True)
        return [torch.from_numpy(each) for each in found.values()]


@torch.no_grad()
def _compile(states: nn.Module, dtype: str) -> tuple[Any, str]:
    """Return a compiled model, and the type that it computes in."""
    import openvino
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    ids, any_size = torch.arange(8).view(2, 4), torch.export.Dim.DYNAMIC
    shapes = ({0: any_size, 1: any_size},)
    # OpenVINO has attention as one operation.
    table = torch.export.default_decompositions()
    del table[torch.ops.aten.scaled_dot_product_attention.default]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(states, (ids,), dynamic_shapes=shapes)
        graph = exported.run_decompositions(table).module()
    # As openvino.convert_model, which also reports its use over the network.
    frontend = FrontEndManager().load_by_framework("pytorch")
    decoder = TorchFXPythonDecoder(graph, dynamic_shapes=True)
    converted = frontend.convert(frontend.load(decoder))
    core = openvino.Core()
    half = dtype == "bfloat16" and "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    options = {
        "INFERENCE_PRECISION_HINT": "bf16" if half else "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
    }
    return core.compile_model(converted, "CPU", options), "bfloat16" if half else "float32"


@torch.inference_mode()
def _errors(
    states: nn.Module, found: OpenVinoStates, vocabulary: int, count: int, length: int
) -> Tensor:
    """Return the relative error of each of the states of some texts."""
    ids = (vocabulary // 2 + torch.arange(count * length)).view(count, length) % vocabulary
    pairs = zip(found(ids), states(ids), strict=True)
    return torch.stack([(a - b).norm() / b.norm() for a, b in pairs])
