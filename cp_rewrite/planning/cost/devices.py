"""Machines and models that plans are made for: the speeds of a device and its links, and the sizes of the model's
attention."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from cp_rewrite.arguments import whole_number

from .constants import SPEEDS, TILE


@dataclass(frozen=True)
class Device:
    """Speeds of one device and its links.

    Args:
        name: of the device.
        forward, backward: FLOP/s of the attention kernel on full tiles; a backward counts as 2.5 forwards.
        memory: bytes per second of a copy on the device, read and written ones added up.
        link, node_link: bytes per second that a rank receives, from ranks of its node and from other nodes.
        all_to_all, ring: the same in a node, of an all-to-all, and of messages from rank to rank while a kernel runs.
        latency, node_latency: seconds that a collective or a signal takes at no size, in a node and between nodes.
        launch: seconds per kernel launch.
        device_bytes: memory of one device.
    """

    name: str
    forward: float
    backward: float
    memory: float
    link: float
    all_to_all: float
    ring: float
    node_link: float
    latency: float
    node_latency: float
    launch: float
    device_bytes: int = 80 << 30

    @classmethod
    def named(cls, name: str) -> Device:
        """The device of that name in DEVICES, or the one in a file that `python -m cp_rewrite calibrate` wrote.

        Raises:
            ValueError: neither a known name nor a readable file of speeds.
        """
        if name in DEVICES:
            return DEVICES[name]
        try:
            device = cls(**json.loads(Path(name).read_text()))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(
                f"device must be one of {', '.join(DEVICES)}, or a file made by `calibrate`; got {name!r}"
            ) from error
        for f in fields(cls)[1:]:
            value = getattr(device, f.name)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{f.name} in {str(name)!r} must be a number > 0, got {value!r}")
        return device

    @classmethod
    def like(cls, product: str | None) -> Device:
        """The device of DEVICES that a GPU's product name ("NVIDIA H200") tells; an unknown GPU counts as an H100.

        None: there is no GPU.
        """
        if product is None:
            return DEVICES["cpu"]
        return next((device for name, device in DEVICES.items() if name in product.lower()), DEVICES["h100"])

    def save(self, path: str | Path) -> None:
        """Write the speeds as JSON, to be read by `named`."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")


DEVICES: Mapping[str, Device] = {name: Device(name, *speeds) for name, speeds in SPEEDS.items()}


@dataclass(frozen=True)
class Model:
    """The attention that is planned for.

    Args:
        heads: (query heads, key/value heads).
        head_dim: of queries, keys and values.
        item_bytes: bytes of one element of keys and values.
    """

    heads: tuple[int, int] = (64, 8)
    head_dim: int = 128
    item_bytes: int = 2

    @classmethod
    def of(cls, heads: Any, head_dim: Any) -> Model:
        """The model of what a user says.

        Raises:
            TypeError, ValueError: no whole numbers >= 1, or query heads that are no multiple of key/value heads.
        """
        if isinstance(heads, tuple | list):
            numbers = tuple(whole_number("a number of heads", number) for number in cast("Sequence[Any]", heads))
            if len(numbers) == 2 and numbers[0] % numbers[1] == 0:
                return cls((numbers[0], numbers[1]), whole_number("head_dim", head_dim))
        raise ValueError(f"heads must be (query, key/value) with query a multiple of key/value, got {heads!r}")

    def __str__(self) -> str:
        return f"{self.heads[0]}/{self.heads[1]} heads of {self.head_dim}"

    @property
    def q_bytes(self) -> int:
        """Bytes of one token's queries, all heads."""
        return self.heads[0] * self.head_dim * self.item_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values, all heads."""
        return 2 * self.heads[1] * self.head_dim * self.item_bytes

    @property
    def tile_flops(self) -> float:
        """Forward FLOPs of one tile, all query heads."""
        return 4.0 * TILE * TILE * self.head_dim * self.heads[0]

    @property
    def row_flops(self) -> float:
        """Forward FLOPs of a local row outside attention: a dense layer's 12 h² weights, h = query heads x head dim."""
        return 24.0 * (self.heads[0] * self.head_dim) ** 2


@dataclass(frozen=True)
class SiteKind:
    """How attention runs in a compiled graph. Args: model: its sizes. exchange: its name, as reports say it."""

    model: Model
    exchange: str

    def __str__(self) -> str:
        return f"{self.model}, {self.exchange}"
