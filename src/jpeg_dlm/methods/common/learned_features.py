"""Token embeddings in place of a frozen encoder, trained together with everything else (encoder.kind none)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class LearnedFeatures(nn.Embedding):
    """Embeddings of unit root mean square, which cannot shrink."""

    def forward(self, input: Tensor) -> Tensor:
        return F.rms_norm(super().forward(input).float(), (self.embedding_dim,))
