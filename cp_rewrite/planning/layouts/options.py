"""The options of a layout, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field

from cp_rewrite.arguments import whole_number
from cp_rewrite.planning.cost.devices import DEVICES, Device, Model
from cp_rewrite.planning.cost.states import StateLayers


@dataclass(frozen=True)
class LayoutOptions:
    """Places where a layout may cut, and what it is planned for.

    Args:
        chunk_size: documents are cut only at multiples of it, counted from the document's start, so no chunk of a
            document is spread over ranks. Documents must start at multiples of it.
        pad_to_multiple: local rows of every rank are rounded up to a multiple of it, with fill at the end.
        ranks_per_node: ranks that share fast links; None: all. Only `balanced` reads it and what follows.
        device, model: what costs are predicted for.
        exchange: the one that will run; `auto`: over several nodes the cheapest, in one `needed`.
        states: layers of a hybrid beside those of attention, which `balanced` weighs, too.
    Raises:
        TypeError, ValueError: a number that is no whole one or below 1.
    """

    chunk_size: int = 1
    pad_to_multiple: int = 1
    ranks_per_node: int | None = None
    device: Device = DEVICES["h200"]
    model: Model = field(default_factory=Model)
    exchange: str = "auto"
    states: StateLayers | None = None

    def __post_init__(self) -> None:
        whole_number("chunk_size", self.chunk_size)
        whole_number("pad_to_multiple", self.pad_to_multiple)
        if self.ranks_per_node is not None:
            whole_number("ranks_per_node", self.ranks_per_node)

    def node_size(self, world_size: int) -> int:
        """Ranks of each node.

        Raises:
            ValueError: nodes of `ranks_per_node` ranks do not make up `world_size`.
        """
        size = self.ranks_per_node or world_size
        if world_size % size:
            raise ValueError(f"ranks_per_node must divide world_size {world_size}, got {size}")
        return size
