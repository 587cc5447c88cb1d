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

from whiten_index.artifacts.files import unforeseen
from whiten_index.encoding.pooling import require_alike
from whiten_index.encoding.products import TRIAL_ERRORS
from whiten_index.errors import EncoderError, first_line

_EXPORTING = threading.Lock()
_LONGEST_TRIAL = 1024  # tokens; branches of models by length are for sliding windows


class OpenVinoStates:
    """States of a model by OpenVINO, called as the module that it was made from.

    Threads may share it, and take turns.
    """

    def __init__(self, states: nn.Module, dtype: str, vocabulary: int, longest: int) -> None:
        """Compile ``states``, token ids (n, t) to a list of states (n, t, d), and compare them.

        ``dtype`` is float32 or bfloat16; the trial needs ``vocabulary`` and the ``longest`` text.

        Raises:
            EncoderError: the model cannot be converted, or gives other states than torch.
        """
        self._turn = threading.Lock()
        try:
            # Exporting is for one thread of a process.
            with _EXPORTING:
                compiled, self.dtype = _compile(states, dtype, longest)
            self._request = compiled.create_infer_request()
            for count, length in (1, 1), (3, 5), (1, min(longest, _LONGEST_TRIAL)):
                ids = torch.arange(count * length).view(count, length)
                ids = (vocabulary // 2 + ids) % vocabulary
                with torch.inference_mode():
                    for found, expected in zip(self(ids), states(ids), strict=True):
                        require_alike(found, expected, TRIAL_ERRORS[getattr(torch, self.dtype)])
        except Exception as error:
            if (of_system := unforeseen(error, step="the compilation by OpenVINO")) is not None:
                raise of_system from error
            # torch, OpenVINO and code of models raise all sorts of errors here.
            raise EncoderError(
                f"OpenVINO cannot run this model ({type(error).__name__}: {first_line(error)}); "
                "use --backend torch"
            ) from error

    def __call__(self, input_ids: Tensor, **_: Any) -> list[Tensor]:
        """Return the states (n, t, d) of token ids (n, t) of texts of one length."""
        with self._turn:
            found = self._request.infer([input_ids.numpy()], share_inputs=True)
        return [torch.from_numpy(each) for each in found.values()]


@torch.no_grad()
def _compile(states: nn.Module, dtype: str, longest: int) -> tuple[Any, str]:
    """Return a compiled model for texts of up to ``longest`` tokens, and its type."""
    import openvino
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    ids, shapes = torch.arange(8).view(2, 4), ((torch.export.Dim.DYNAMIC,) * 2,)
    # OpenVINO has attention as one operation.
    table = torch.export.default_decompositions()
    del table[torch.ops.aten.scaled_dot_product_attention.default]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(states, (ids,), dynamic_shapes=shapes)
        # OpenVINO does not look at these.
        most = min(float(each.upper) for each in exported.range_constraints.values())
        if most < longest:
            raise ArithmeticError(f"its graph is for texts of up to {most:g} tokens")
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
        "ENABLE_CPU_PINNING": False,  # several processes would take the same cores
    }
    return core.compile_model(converted, "CPU", options), "bfloat16" if half else "float32"
