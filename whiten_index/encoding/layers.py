"""Chosen hidden states of a Transformer: no layer above the highest is run, no other is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whiten_index.encoding.pooling import mean_layers


class _Enough(Exception):  # noqa: N818 (not an error: it leaves a forward pass early)
    """Raised by a hook when the highest layer asked for is there."""


class ChosenLayers:
    """Runs a model and returns the mean of chosen hidden states.

    Hidden states are read by hooks. A model whose layers cannot be found, or whose hooks give other
    numbers than its own ``output_hidden_states``, is run whole. Several threads may call at once.

    Attributes:
        by_hooks: whether hooks are used.
    """

    def __init__(self, model: Any, layers: Sequence[int], last: int) -> None:
        """Choose ``layers`` of a model whose last one is ``last``, 0 being the embeddings."""
        self._model = model
        self._layers = tuple(layers)
        self._last = last
        self._seen = threading.local()
        self.by_hooks = True
        if self._layers != (last,):
            self._hook(_stack_of(model, last))

    @property
    def only_last(self) -> bool:
        """Whether the last layer alone is asked for."""
        return self._layers == (self._last,)

    def __call__(self, **inputs: Any) -> Tensor:
        """Return (n, t, d) for a model's inputs."""
        states = self.each(**inputs)
        return states[0] if self.only_last else mean_layers(states, range(len(states)))

    def each(self, **inputs: Any) -> list[Tensor]:
        """Return the chosen hidden states for a model's inputs, (n, t, d) each, in their order."""
        if self.only_last:
            return [self._model(**inputs).last_hidden_state]
        return self._run(inputs) if self.by_hooks else self._run_whole(inputs)

    def _hook(self, stack: nn.ModuleList | None) -> None:
        if stack is None:
            self.by_hooks = False
            return
        for layer in self._layers:
            if layer == 0:
                stack[0].register_forward_pre_hook(self._before_first, with_kwargs=True)
            elif layer < self._last:
                stack[layer - 1].register_forward_hook(self._after(layer))
        self.by_hooks = self._agrees()

    def _agrees(self) -> bool:
        """Compare both ways once: a model's own code may do anything between its layers."""
        try:
            device = next(self._model.parameters()).device
            ids = torch.arange(4, device=device).reshape(1, 4) % self._model.config.vocab_size
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            with torch.inference_mode():
                pairs = zip(self._run(inputs), self._run_whole(inputs), strict=True)
                return all(torch.allclose(a, b, atol=1e-3) for a, b in pairs)
        except Exception:
            # Whatever a model's own code raises where hooks look at it, it is then run whole.
            return False

    def _run(self, inputs: dict[str, Any]) -> list[Tensor]:
        states: dict[int, Tensor] = {}
        self._seen.states = states
        try:
            states[self._last] = self._model(**inputs).last_hidden_state
        except _Enough:
            pass
        finally:
            self._seen.states = None
        return [states[layer] for layer in self._layers]

    def _run_whole(self, inputs: dict[str, Any]) -> list[Tensor]:
        output = self._model(**inputs, output_hidden_states=True)
        return [output.hidden_states[layer] for layer in self._layers]

    def _keep(self, layer: int, state: Tensor) -> None:
        states: dict[int, Tensor] | None = getattr(self._seen, "states", None)
        if states is None:
            return
        states[layer] = state
        if layer == max(self._layers):
            raise _Enough

    def _before_first(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._keep(0, args[0] if args else kwargs["hidden_states"])

    def _after(self, layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self._keep(layer, output[0] if isinstance(output, tuple) else output)

        return hook


def _stack_of(model: nn.Module, count: int) -> nn.ModuleList | None:
    """Return the model's list of layers, None where there is not exactly one candidate."""
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    return found[0] if len(found) == 1 else None
