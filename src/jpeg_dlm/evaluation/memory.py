"""Bytes that training and sampling need on one device, by formula and without torch.

What backward keeps was counted on autograd's own list of saved tensors, for every kind of layer, in fp32 and under bf16
autocast (measured). It is a number of bytes for each position, linear in the width H of the layer and in the width I
inside its feed-forward network. Attention scores are not kept, except where they are capped.
"""

from __future__ import annotations

from dataclasses import dataclass

from jpeg_dlm.config import Config, logit_rows
from jpeg_dlm.evaluation.counts import codec_inner, network_ids, parameter_counts, prefix_len, swiglu_inner

FP32, BF16 = 4, 2  # bytes

# (bytes per H, bytes per I) of one position in one layer, in fp32 and under bf16 autocast (measured)
KEPT = {
    "dit": ((32.6, 8), (20.6, 4)),
    "ddit": ((57.2, 8), (36.8, 4)),  # modulated and gated by the noise level
    "capped": ((49.7, 8), (37.0, 4)),  # the same with capped attention, beside its scores
    "causal": ((40.2, 8), (24.2, 4)),
    "unet": ((40.3, 16), (26.1, 8)),  # the network of COSMOS
    "codec": ((55.7, 4), (32.5, 2)),  # a position is a query on one side of the codec and context on the other
}
DROPOUT = (8, 4)  # more bytes per H where a transformer over tokens has dropout (measured)
CAPPED_SCORE = (7.25, 9.6)  # bytes of a score of capped attention, mostly its tanh and its softmax (measured)
# Bytes of a logit at the worst moment: itself and its log-softmax, or that and its gradient; Duo's bound keeps more (measured).
LOGIT = {"duo": 16}
PLAIN_LOGIT = 2 * FP32
HALF_MASKED = ("mdlm", "sedd")  # half of the positions have no loss, so no logits


@dataclass(frozen=True)
class Stack:
    """Equal layers over `positions` of one row."""

    layers: int
    positions: float
    width: int
    inner: int
    kind: str
    scores: int = 0  # heads times keys, where scores are kept
    dropout: bool = False

    def bytes_per_layer(self, bf16: bool) -> float:
        per_width, per_inner = KEPT[self.kind][bf16]
        per_width += DROPOUT[bf16] if self.dropout else 0
        return self.positions * (per_width * self.width + per_inner * self.inner + CAPPED_SCORE[bf16] * self.scores)


def stacks(config: Config) -> list[Stack]:
    """The layers that gradients flow through, for one row of a batch."""
    m, tokens, method = config.model, config.data.token_len, config.method
    if method in ("jpeg-dlm", "cosmos-codec"):
        codec = Stack(m.codec_layers, tokens + m.latent_len, m.latent_dim, codec_inner(config), "codec")
        if method == "cosmos-codec":
            return [codec]
        # The decode branch and every draw of the denoise branch pass through the DiT.
        positions = (1 + config.objective.flow_draws) * (m.latent_len + prefix_len(config))
        return [codec, Stack(m.depth, positions, m.hidden, swiglu_inner(config), "dit")]
    if method == "elf":
        return [Stack(m.depth, tokens + prefix_len(config), m.hidden, swiglu_inner(config), "dit")]
    inner = int(m.hidden * m.mlp_ratio)
    if method == "cosmos":
        return [Stack(m.depth, m.latent_len, m.hidden, inner, "unet")]
    kind = {"ar": "causal", "flm": "capped"}.get(method, "ddit")
    scores = m.heads * tokens if kind == "capped" else 0
    return [Stack(m.depth, tokens, m.hidden, inner, kind, scores, m.dropout > 0)]


def logit_bytes(config: Config) -> int:
    """What of a micro-batch is as wide as the vocabulary, at its largest moment.

    FLM feeds such a tensor to its network, and so does Duo in its curriculum; both are kept for the embedding's gradient.
    """
    method, positions = config.method, config.train.batch * config.data.token_len
    if method == "cosmos":
        return 0
    wide_input = method == "flm" or (method == "duo" and config.objective.curriculum == "simple")
    with_logits = positions * config.objective.decode_prob if method == "elf" else positions
    with_logits = with_logits / 2 if method in HALF_MASKED else with_logits
    chunk = config.objective.ce_chunk
    if method == "jpeg-dlm":  # its loss makes gradients chunk by chunk, in place of the logits
        return round(FP32 * network_ids(config) * min(logit_rows(chunk, network_ids(config)), positions))
    with_logits = min(chunk, with_logits) if chunk > 0 else with_logits
    kept = with_logits * LOGIT.get(method, PLAIN_LOGIT) + (positions * FP32 if wide_input else 0)
    return round(network_ids(config) * kept)


def planned_precision(config: Config) -> str:
    """The type of training on the GPUs that a plan is made for."""
    return "fp32" if config.train.precision == "fp32" else "bf16"


def activation_bytes(config: Config, recompute: bool = False) -> int:
    """What backward needs of one micro-batch, logits included.

    `recompute` is gradient checkpointing: of each layer only the input is kept, and one layer at a time is computed again.
    """
    bf16, rows, found = planned_precision(config) == "bf16", config.train.batch, stacks(config)
    if not recompute:
        layers = sum(stack.layers * stack.bytes_per_layer(bf16) for stack in found)
    else:
        inputs = sum(stack.layers * stack.positions * stack.width * FP32 for stack in found)
        layers = inputs + max(stack.bytes_per_layer(bf16) for stack in found)
    return round(rows * layers) + logit_bytes(config)


# ---------------------------------------------------------------- JPEG-DLM on one device


def sampling_moments(config: Config) -> dict[str, int]:
    """Numbers that the largest moments of sampling one text hold at once, by where it is."""
    m, tokens = config.model, config.data.token_len
    codec = tokens * (5 * m.latent_dim + 2 * codec_inner(config)) + m.latent_len * 2 * m.latent_dim
    return {
        "dit": (m.latent_len + prefix_len(config)) * (5 * m.hidden + 3 * swiglu_inner(config)),
        "decompressor": codec,
        "logits": tokens * config.data.vocab_size,
    }


def sampling_bytes(config: Config, batch: int) -> int:
    """Weights that sampling uses and its largest moment, be it inside a layer or the logits."""
    parts = parameter_counts(config)
    weights = parts["total"] - parts["compressor"]
    return FP32 * (weights + batch * max(sampling_moments(config).values()))


def memory_estimate(config: Config, sampling_batch: int = 16) -> dict[str, int]:
    """Bytes on one device by use. The frozen encoder is not counted; weights and optimizer are fp32 in every precision."""
    parts = parameter_counts(config)
    weights = FP32 * parts["total"]
    training = {
        "weights": weights,
        "target_compressor": FP32 * parts["compressor"],
        "gradients": weights,
        "adamw": 2 * weights,  # first and second moments
        "ema": weights,
        "activations": activation_bytes(config),
    }
    return training | {"training": sum(training.values()), "sampling": sampling_bytes(config, sampling_batch)}


# ---------------------------------------------------------------- sampling with ELF and AR


def elf_moment(config: Config) -> int:
    """Numbers of ELF's largest moment, for one text."""
    m, tokens = config.model, config.data.token_len
    block = (tokens + prefix_len(config)) * (5 * m.hidden + 3 * swiglu_inner(config))
    return max(block, tokens * config.data.vocab_size)


def ar_moment(config: Config) -> int:
    """Numbers of AR's largest moment, for one text: a layer over what is read at once, or the next token in float64.

    Its logits, probabilities and their sums are three float64 tensors, so six numbers of four bytes for each id.
    """
    m, read = config.model, 1 if config.sampler.kv_cache else config.data.token_len
    return max(read * (5 * m.hidden + 2 * int(m.hidden * m.mlp_ratio)), 6 * network_ids(config))


def kv_cache_numbers(config: Config) -> int:
    """Keys and values of every layer and position, for one text; none without a cache."""
    m = config.model
    positions = config.data.token_len + (m.start_id == -1)
    return 2 * m.depth * positions * m.hidden if config.sampler.kv_cache else 0
