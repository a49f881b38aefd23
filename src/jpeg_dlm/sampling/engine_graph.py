"""CUDA graphs: a function of tensors is recorded once for each set of shapes and replayed, without launch overhead."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WARMUP = 3  # calls before recording, in which libraries choose kernels and allocate workspaces (PyTorch's notes)
Function = Callable[..., Tensor]


class Recorded:
    """`function` of tensors or None; on a CUDA device by replaying a graph, elsewhere by calling it."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.graphs: dict[tuple[torch.Size | None, ...], Replay] = {}

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        if not any(x is not None and x.is_cuda for x in inputs):
            return self.function(*inputs)
        shapes = tuple(None if x is None else x.shape for x in inputs)
        if shapes not in self.graphs:
            self.graphs[shapes] = Replay(self.function, inputs)
        return self.graphs[shapes](*inputs)


class Replay:
    """One recording with its own input and output memory."""

    def __init__(self, function: Function, inputs: tuple[Tensor | None, ...]) -> None:
        self.inputs = [None if x is None else x.clone() for x in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                function(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = function(*self.inputs)

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        for own, x in zip(self.inputs, inputs, strict=True):
            if own is not None and x is not None:
                own.copy_(x)
        self.graph.replay()
        return self.output.clone()  # the next replay writes over it
