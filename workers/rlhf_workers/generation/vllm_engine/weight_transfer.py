"""Replaces the weights in each of vLLM's executor processes by vLLM's layerwise reload.

Rule: from `begin` to `finish` the model mixes two versions and must not run. The next complete update repairs what a
failure leaves.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

_log_of_reload = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")


class LayerwiseUpdate:
    """Update of one process's share of the model."""

    def __init__(self, runner: Any, *, draft: bool = False) -> None:
        """`runner`: vLLM's model runner. `draft`: update vLLM's draft model instead of the policy."""
        self._config: Any = runner.vllm_config
        speculative = self._config.speculative_config
        self._model: Any = runner.get_draft_model() if draft else runner.get_model()
        self._model_config: Any = speculative.draft_model_config if draft else self._config.model_config
        self._runner: Any = runner
        self._expected: set[str] = set()
        self._loaded: set[str] = set()

    def begin(self) -> None:
        """End an interrupted update, if there is one, and put every layer's old tensors aside."""
        with self._changing():
            self._restore()  # an earlier update may have been interrupted
            self._expected = {name for name, _ in self._model.named_parameters()}
            self._forget_packed_experts()
            initialize_layerwise_reload(self._model)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load some tensors under the names of a checkpoint; those of a layer may come in several calls.

        They must stay readable until `finish`: a layer is built when its last tensor has come.
        """
        with self._changing():
            self._loaded |= self._model.load_weights(iter(tensors)) or set()

    def finish(self) -> None:
        """Complete all layers; raise RuntimeError if a parameter was not loaded, unless the model is quantized."""
        with self._changing():
            missing = sorted(self._expected - self._loaded)
            if missing and self._model_config.quantization is None:
                raise RuntimeError(f"vLLM did not load {missing[0]} (and {len(missing) - 1} more parameters)")
            self._restore()
            self._pack_tied()
        self._runner.reset_lora_state()
        if self._runner.device.type != "cpu":
            torch.accelerator.synchronize()  # before the memory of the sources is released

    @contextmanager
    def _changing(self) -> Iterator[None]:
        level = _log_of_reload.level
        _log_of_reload.setLevel(logging.ERROR)  # it warns about every layer that has nothing to load
        try:
            with set_current_vllm_config(self._config), torch.no_grad():
                yield
        except BaseException:
            with suppress(Exception), set_current_vllm_config(self._config), torch.no_grad():
                self._restore()  # while the sources can be read; the next update would add to leftovers
            raise
        finally:
            _log_of_reload.setLevel(level)

    def _restore(self) -> None:
        finalize_layerwise_reload(self._model, self._model_config)

    def _forget_packed_experts(self) -> None:
        """Drop the kernel of experts on a CPU so that it packs them again; on a GPU graphs read its memory."""
        for layer in self._model.modules() if self._runner.device.type == "cpu" else ():
            method: Any = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def _pack_tied(self) -> None:
        """Pack layers that share a parameter with an earlier one, as they got nothing to load."""
        seen: set[int] = set()
        for layer in self._model.modules():
            own = {id(parameter) for parameter in layer.parameters(recurse=False)}
            method = getattr(layer, "quant_method", None)
            if own & seen and isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(layer)
            seen |= own
