"""The common interface of all frozen text encoders E: token ids in, standardized features h out.

Shapes: B batch, L tokens, F feature width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import EncoderConfig
from jpeg_dlm.encoders.small import check_statistics
from jpeg_dlm.errors import DataError, UsageError
from jpeg_dlm.files import check_listed, write_sealed

STATISTICS_FILE = "feature_statistics.safetensors"
STD_FLOOR = 1e-5  # avoids division by zero for constant channels


def tensors_sha256(tensors: Mapping[str, Tensor], *extra: str) -> str:
    """Return the sha256 of the names, types, shapes and bytes of the tensors, sorted by name."""
    digest = hashlib.sha256("\0".join(extra).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def features_fingerprint(mean: Tensor, std: Tensor, weights: str, scale: str) -> str:
    """Return a sha256 of all inputs of standardized features: statistics, weight fingerprint and scale."""
    return tensors_sha256({"mean": mean, "std": std}, weights, scale)


class FrozenEncoder(nn.Module):
    """A feature extractor that is never trained. Subclasses implement `raw_features`; this class standardizes them."""

    feature_mean: Tensor
    feature_std: Tensor

    def __init__(self, model: nn.Module, name: str, feature_dim: int, config: EncoderConfig) -> None:
        super().__init__()
        self.model = model
        self.name = name
        self.feature_dim = feature_dim
        self.layer, self.layers, self.scale = config.layer, config.layers, config.scale
        self.register_buffer("feature_mean", torch.zeros(feature_dim))
        self.register_buffer("feature_std", torch.full((feature_dim,), config.std if config.scale == "fixed" else 1.0))
        self.has_statistics = config.scale != "per_channel"
        self._weights_sha256 = ""
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> FrozenEncoder:
        """Stay in eval mode: dropout in a frozen encoder would make features random."""
        return super().train(False)

    def mixed(self, states: Sequence[Tensor]) -> Tensor:
        """Return the one state, or with `encoder.layers` the mean of states of unit root mean square, so that each counts."""
        if not self.layers:
            return states[0]
        return torch.stack([F.rms_norm(h_BLF.float(), h_BLF.shape[-1:]) for h_BLF in states]).mean(0)

    def raw_features(self, tokens_BL: Tensor, mask_BL: Tensor | None) -> Tensor:
        """Return the hidden states of the configured layers, before standardization."""
        raise NotImplementedError

    @torch.no_grad()
    def forward(self, tokens_BL: Tensor, mask_BL: Tensor | None = None) -> Tensor:
        """Return standardized fp32 features h_BLF; `mask_BL` is True at real tokens, and only these are attended to."""
        if not self.has_statistics:
            raise UsageError(
                f"encoder.scale 'per_channel' has no feature statistics for {self.name}: measure them with "
                "measure_statistics(), or choose --encoder.scale fixed."
            )
        h_BLF = self.raw_features(tokens_BL, mask_BL).float()
        return h_BLF if self.scale == "none" else (h_BLF - self.feature_mean) / self.feature_std

    @property
    def conditions(self) -> str:
        """Everything besides the weights that raw features depend on."""
        return f"layer {self.layers or self.layer}"

    @property
    def weights_fingerprint(self) -> str:
        """sha256 of the weights and the conditions; identifies raw features."""
        if not self._weights_sha256:  # computed once, as the weights are frozen
            self._weights_sha256 = tensors_sha256(self.model.state_dict(), self.conditions)
        return self._weights_sha256

    @property
    def fingerprint(self) -> str:
        """sha256 of weights, layer, scale and statistics; identifies the features that `forward` returns."""
        return features_fingerprint(self.feature_mean, self.feature_std, self.weights_fingerprint, self.scale)

    def set_feature_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Set the statistics that `forward` standardizes with; only scale 'per_channel' uses statistics."""
        if self.scale != "per_channel":
            raise UsageError(f"encoder.scale is '{self.scale}': choose --encoder.scale per_channel to use feature statistics.")
        check_statistics(mean, std, self.feature_dim)
        self.feature_mean.copy_(mean)
        self.feature_std.copy_(std)
        self.has_statistics = True


@torch.no_grad()
def measure_statistics(encoder: FrozenEncoder, batches: Iterable[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor]:
    """Return the per-channel mean and standard deviation of raw features over real tokens, accumulated in float64."""
    total = torch.zeros(encoder.feature_dim, dtype=torch.float64)
    squares = torch.zeros_like(total)
    count = 0
    for tokens_BL, mask_BL in batches:
        h_BLF = encoder.raw_features(tokens_BL, mask_BL)
        rows = (h_BLF.flatten(0, 1) if mask_BL is None else h_BLF[mask_BL]).double().cpu()
        total += rows.sum(0)
        squares += rows.square().sum(0)
        count += len(rows)
    if count < 2:
        raise DataError("Feature statistics need at least two tokens: give more text.")
    mean = total / count
    std = (squares / count - mean.square()).clamp_min(0).sqrt().clamp_min(STD_FLOOR)
    return mean.float(), std.float()


def save_statistics(folder: Path, encoder: FrozenEncoder) -> Path:
    """Write an encoder's statistics and the fingerprint of its weights to `folder`."""
    from safetensors.torch import save

    path = Path(folder) / STATISTICS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"mean": encoder.feature_mean.cpu(), "std": encoder.feature_std.cpu()}
    write_sealed(path.parent, [], STATISTICS_FILE, save(tensors, metadata={"weights": encoder.weights_fingerprint}))
    return path


def load_statistics(folder: Path, encoder: FrozenEncoder) -> bool:
    """Load the statistics in `folder` into `encoder`; return False when there are none."""
    path = Path(folder) / STATISTICS_FILE
    if not path.is_file():
        return False
    weights, mean, std = read_statistics(path)
    if weights != encoder.weights_fingerprint:
        raise DataError(f"'{path}' was measured with another encoder or layer: delete it and measure the statistics again.")
    encoder.set_feature_statistics(mean, std)
    return True


def read_statistics(path: Path) -> tuple[str, Tensor, Tensor]:
    """Read statistics: the fingerprint of the weights they were measured with, the mean and the standard deviation."""
    from safetensors import SafetensorError, safe_open

    check_listed(path.parent, path.name, remedy="delete the folder and measure the statistics again")
    try:
        with safe_open(path, framework="pt") as file:
            weights = (file.metadata() or {}).get("weights", "")
            mean, std = file.get_tensor("mean"), file.get_tensor("std")
        if {mean.dtype, std.dtype} != {torch.float32}:
            raise ValueError("the statistics are not float32")
    except (OSError, SafetensorError, ValueError, RuntimeError, AttributeError) as error:
        raise DataError(f"Cannot read '{path}' ({error}): delete it and measure the statistics again.") from error
    return weights, mean, std
