"""Description of one weight that a loop uses at every step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from loopq.errors import SystemContractError
from loopq.storage.schema import Name, checked
from loopq.storage.weights import Orientation, kernel_of, stored_shape

if TYPE_CHECKING:
    from torch import Tensor

Treatment = Literal["gptq", "rtn", "dense"]


@dataclass(frozen=True)
class SharedParameter:
    """One weight that the loop uses at every step.

    Parameters
    ----------
    name : str
        Full name of the parameter in the model's files, or under its first owner ("transformer.adapter.weight").
    owners : tuple of str
        Names of all modules that hold this parameter, the first owner first. Empty if no module is called with it. Its
        products are watched then.
    in_features, out_features : int
        Input and output width of the product. For a convolution, `in_features` is the number of input channels times
        the size of the kernel: its product is that of a linear layer with the patch under the kernel at each place.
    orientation : {"out_in", "in_out", "table", "conv", "conv3", "conv3x3", ...}
        Storage of the weight (`loopq.storage.weights.Orientation`).
    invocations : int
        Calls in one rollout of the requested depth.
    role : str
        Kind of layer: "adapter", "attention", "mlp", "modulation", "head" or another term of the field.
    exposed : bool
        No identity path leads around the layer, so its whole error is fed back into the loop.
    treatment : {"gptq", "rtn", "dense"}
        Default treatment. "gptq" is calibrated. "rtn" is rounded by the paper's methods and calibrated by others
        (`Method.rounds_as_published`). "dense" stays unchanged.
    reason : str
        Reason for a treatment other than "gptq".
    fused : str
        Blocks of output rows in one weight, in order, joined by "+" ("q+k+v", "gate+up"). "/head" at the end means
        that they repeat head by head. Empty if the weight is one projection.
    routed_in : str
        For an expert, the module that routes rows to experts. Its calls are then the steps, counted by `invocations`.
        A step may give the expert any number of rows, or none.
    """

    name: str
    owners: tuple[str, ...]
    in_features: int
    out_features: int
    orientation: Orientation
    invocations: int
    role: str
    exposed: bool = False
    treatment: Treatment = "gptq"
    reason: str = ""
    fused: str = ""
    routed_in: str = ""

    @property
    def expert(self) -> tuple[str, str, str] | None:
        """Name of an expert's module in three parts: before its number, the number, and the rest. None of others."""
        if not self.routed_in:
            return None
        parts = re.fullmatch(rf"({re.escape(self.routed_in)}\..*?)(\d+)(\..*)", self.owners[0])
        return (parts[1], parts[2], parts[3]) if parts else None

    def matrix(self, stored: Tensor) -> Tensor:
        """View a stored tensor of this weight, or its gradient, in shape (out_features, in_features)."""
        plain = stored.flatten(1) if kernel_of(self.orientation) else stored
        return plain.T if self.orientation == "in_out" else plain

    def __post_init__(self) -> None:
        """Reject a name that cannot be a file name, as needed in a dump and while layers are solved.

        Also rejects a kernel that does not fit the inputs.
        """
        checked(Name, self.name, "parameter", SystemContractError)
        stored_shape((self.out_features, self.in_features), self.orientation)
