"""Fills that are mapped while the model runs, one layer ahead of it."""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import torch


class LayersAhead:
    """Advances fills layer by layer inside one forward.

    On a CUDA device they run on a stream of their own, so that layer l + 1 is mapped while layer l is
    recomputed; elsewhere each layer is mapped when the forward comes to it. Possible only where the positions
    are known before the map: rank disagreement is a sum over the predictions of all layers.
    """

    def __init__(self, fills: Sequence[Iterator[Any]], device: torch.device) -> None:
        """Each fill writes one layer's entries into the pool per step, for as many steps as there are layers."""
        self._fills = fills
        self._stream: torch.cuda.Stream | None = None
        if fills and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._advance_aside(self._stream)

    def reach_layer(self) -> None:
        """Call once at each layer, in order: afterwards the current stream sees that layer's entries."""
        if self._stream is None:
            self._advance()
            return
        torch.cuda.current_stream(self._stream.device).wait_event(self._written)
        self._advance_aside(self._stream)

    def _advance_aside(self, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            self._advance()
            self._written = stream.record_event()

    def _advance(self) -> None:
        for fill in self._fills:
            next(fill, None)
