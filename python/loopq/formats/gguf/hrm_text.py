"""HRM-Text in llama.cpp: a low stack that runs several times for each run of the high one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from loopq.formats.gguf.shape import ARCHITECTURES, FIXED, MODULES, Shape
from loopq.formats.layouts.hrm_text import PARTS

#: Numbers that say how the stacks run.
_CYCLES = {"num_layers_per_stack": "layers_per_stack", "H_cycles": "h_cycles", "L_cycles": "l_cycles"}


@ARCHITECTURES.register("hrm_text")
class HRMTextShape(Shape):
    """Two stacks, the low one before the high one. llama.cpp counts a layer once per run."""

    classes: ClassVar[tuple[str, ...]] = ("HrmTextForCausalLM",)
    needed: ClassVar[tuple[str, ...]] = ("rms_norm_eps", *_CYCLES)
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **FIXED,
        "attention_bias": (False,),
        "mlp_bias": (False,),
    }
    modules: ClassVar[Mapping[str, str]] = MODULES | {"attn.o_proj": "attn_output"}
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = PARTS
    pairs: ClassVar[bool] = False

    @property
    def n_loops(self) -> int:
        """Runs of the high stack."""
        return int(self.config["H_cycles"])

    @property
    def n_layers(self) -> int:
        """Layers of the model, once per run."""
        return int(self.config["num_layers_per_stack"]) * self.n_loops * (int(self.config["L_cycles"]) + 1)

    @property
    def n_stored(self) -> int:
        """Layers of each of the two stacks."""
        return int(self.config["num_layers_per_stack"])

    @property
    def n_blocks(self) -> int:
        """Both stacks, once."""
        return 2 * self.n_stored

    @property
    def stacks(self) -> dict[str, int]:
        """Name prefixes of layers with the number of the first."""
        return {
            "model.L_module.layers.": 0,
            "model.H_module.layers.": int(self.config["num_layers_per_stack"]),
        }

    def tensors(self, name: str) -> list[str]:
        """As in `Shape`, with the low stack's first state."""
        return ["hrm.z_l_init"] if name == "model.z_L_init" else super().tensors(name)

    def header(self) -> dict[str, Any]:
        """As in `Shape`, with the cycles."""
        cycles = {f"hrm.{key}": self.config[name] for name, key in _CYCLES.items()}
        more = {
            "hrm.prefix_lm": bool(self.config.get("prefix_lm")),
            # The default of the published class.
            "embedding_scale": float(
                self.config.get("embedding_scale") or 1 / self.config["initializer_range"]
            ),
        }
        return super().header() | cycles | more
