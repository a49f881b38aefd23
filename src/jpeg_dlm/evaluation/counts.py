"""Parameters, multiply-accumulates and memory of a config, by formula: nothing is built and torch is not needed.

Letters as elsewhere: L tokens, N latents, D latent width, F feature width, H hidden width, V vocabulary, K solver steps.
One multiply-accumulate counts as one operation, as in the paper's "sampling compute".
"""

from __future__ import annotations

from jpeg_dlm.config import Config

FP32, BF16 = 4, 2  # bytes


def linear(dim_in: int, dim_out: int, bias: bool = True) -> int:
    """Parameters of a linear layer; without bias also its multiply-accumulates for one vector."""
    return dim_in * dim_out + (dim_out if bias else 0)


def codec_inner(config: Config) -> int:
    """Width inside the codec's feed-forward layers."""
    return int(config.model.latent_dim * config.model.codec_mlp_ratio)


def swiglu_inner(config: Config) -> int:
    """Width inside the DiT's SwiGLU: two thirds of the ratio, since it has three matrices instead of two."""
    return int(int(config.model.hidden * config.model.mlp_ratio) * 2 / 3)


def prefix_len(config: Config) -> int:
    """Tokens in front of the latents."""
    return config.model.time_tokens + config.model.sc_tokens + config.model.mode_tokens


# ---------------------------------------------------------------- parameters


def codec_ffn_parameters(config: Config) -> int:
    """LayerNorm and two linears with bias."""
    d, inner = config.model.latent_dim, codec_inner(config)
    return 2 * d + linear(d, inner) + linear(inner, d)


def codec_layer_parameters(config: Config) -> int:
    """Attention (q, out, keys and values of latents and of context; four norms) and feed-forward."""
    d = config.model.latent_dim
    head = d // config.model.codec_heads
    return 2 * linear(d, d, False) + 2 * linear(d, 2 * d, False) + 2 * d + 2 * head + codec_ffn_parameters(config)


def compressor_parameters(config: Config) -> int:
    """Latent queries, feature bottleneck, token positions, layers, two norms."""
    m, f = config.model, config.encoder.feature_dim
    bottleneck = linear(f, m.bottleneck_dim, False) + linear(m.bottleneck_dim, m.latent_dim, False)
    tables = (m.latent_len + config.data.token_len) * m.latent_dim
    return tables + bottleneck + m.codec_layers * codec_layer_parameters(config) + 2 * m.latent_dim


def decompressor_parameters(config: Config) -> int:
    """Base query with its feed-forward, two position tables, gated layers, output bottleneck; a gate has two numbers."""
    m, f = config.model, config.encoder.feature_dim
    query = m.latent_dim + codec_ffn_parameters(config) + 2
    tables = (m.latent_len + config.data.token_len) * m.latent_dim
    layers = m.codec_layers * (codec_layer_parameters(config) + 2 * 2)
    return query + tables + layers + linear(m.latent_dim, m.bottleneck_dim, False) + linear(m.bottleneck_dim, f, False)


def dit_block_parameters(config: Config) -> int:
    """Attention with biases and normed q and k, SwiGLU with biases, two norms."""
    h, inner = config.model.hidden, swiglu_inner(config)
    attention = linear(h, 3 * h) + 2 * (h // config.model.heads) + linear(h, h)
    return attention + linear(h, 2 * inner) + linear(inner, h) + 2 * h


def dit_parameters(config: Config) -> int:
    """Prefix tokens, input projections, two scalar embedders, blocks, two heads."""
    m = config.model
    inputs = linear(2 * m.latent_dim, m.latent_dim) + linear(m.latent_dim, m.bottleneck_dim, False)
    inputs += linear(m.bottleneck_dim, m.hidden)
    embedders = 2 * (linear(m.freq_dim, m.hidden) + linear(m.hidden, m.hidden))
    heads = 2 * (m.hidden + linear(m.hidden, m.latent_dim))
    return prefix_len(config) * m.hidden + inputs + embedders + m.depth * dit_block_parameters(config) + heads


def parameter_counts(config: Config) -> dict[str, int]:
    """Parameters by part; the frozen encoder and the target compressor, which is a copy, are not counted."""
    m = config.model
    parts = {
        "compressor": compressor_parameters(config),
        "decompressor": decompressor_parameters(config),
        "dit": dit_parameters(config),
        "unembed_proj": linear(config.encoder.feature_dim, m.proj_dim),
        "lm_head": linear(m.proj_dim, config.data.vocab_size),
    }
    if not m.shared:
        parts["predictor"] = parts["dit"]
    return parts | {
        "dit_and_projection": parts["dit"] + parts["unembed_proj"] + parts["lm_head"],
        "total": sum(parts.values()),
    }


# ---------------------------------------------------------------- multiply-accumulates of one sample


def attention_macs(queries: int, keys: int, width: int) -> int:
    """Scores and weighted values, over all heads."""
    return 2 * queries * keys * width


def dit_macs(config: Config, latent_len: int) -> int:
    """One evaluation of the network on `latent_len` latents; only one of its two heads runs."""
    m, n, s = config.model, latent_len, latent_len + prefix_len(config)
    inputs = n * (2 * m.latent_dim * m.latent_dim + m.latent_dim * m.bottleneck_dim + m.bottleneck_dim * m.hidden)
    embedders = 2 * (m.freq_dim * m.hidden + m.hidden * m.hidden)
    block = s * (4 * m.hidden**2 + 3 * m.hidden * swiglu_inner(config)) + attention_macs(s, s, m.hidden)
    return inputs + embedders + m.depth * block + n * m.hidden * m.latent_dim


def decompressor_macs(config: Config, latent_len: int) -> int:
    """L token queries attend to themselves and to the latents.

    The released code repeats the base query L times and sends every copy through its feed-forward network, which is
    counted here as there; ours sends it once and repeats the result, so it does L - 1 of those passes fewer.
    """
    m, tokens, d = config.model, config.data.token_len, config.model.latent_dim
    ffn = 2 * d * codec_inner(config)
    projections = tokens * 4 * d * d + latent_len * 2 * d * d  # q, out, own keys and values; those of the latents
    layer = projections + attention_macs(tokens, tokens + latent_len, d) + tokens * ffn
    bottleneck = tokens * m.bottleneck_dim * (d + config.encoder.feature_dim)
    return tokens * ffn + m.codec_layers * layer + bottleneck


def projection_macs(config: Config) -> int:
    """Features to logits at every token."""
    m = config.model
    return config.data.token_len * m.proj_dim * (config.encoder.feature_dim + config.data.vocab_size)


def sampling_macs(config: Config, latent_len: int | None = None) -> dict[str, int]:
    """Multiply-accumulates of one sample by part; `latent_len` L instead of N gives the paper's uncompressed estimate."""
    n = config.model.latent_len if latent_len is None else latent_len
    parts = {
        "dit": config.sampler.evaluations(config.data.token_len) * dit_macs(config, n),
        "decompressor": decompressor_macs(config, n),
        "projection": projection_macs(config),
    }
    return parts | {"evaluations": config.sampler.evaluations(config.data.token_len), "total": sum(parts.values())}


# ---------------------------------------------------------------- memory


def tokens_per_step(config: Config) -> int:
    """Tokens behind one optimizer step."""
    t = config.train
    return t.batch * t.accumulation * t.devices * config.data.token_len


def activation_bytes(config: Config) -> int:
    """What backward needs of one micro-batch: an estimate by counting vectors kept per position, good to a factor of 2.

    A pre-norm block keeps its input, the normed input, queries, keys and values before and after their norms, the mixed
    values, the second residual and normed input (about 12 widths), and the inside of its feed-forward (SwiGLU gate, up,
    silu and product: 4 inner widths; GELU before and after: 2). Context positions of the codec add 4 widths (normed, keys
    before and after their norm, values). Attention scores are not kept. Both branches pass through the DiT, so it has 2 B
    rows. Logits are kept twice, in fp32: as they are and as their softmax. Self-conditioning passes keep nothing.
    """
    m, o, rows = config.model, config.objective, config.train.batch
    tokens, latents, d = config.data.token_len, m.latent_len, m.latent_dim
    codec = 12 * d + 2 * codec_inner(config)
    compressor = m.codec_layers * (latents * codec + tokens * 4 * d)
    decompressor = m.codec_layers * (tokens * codec + latents * 4 * d)
    dit = 2 * m.depth * (latents + prefix_len(config)) * (12 * m.hidden + 4 * swiglu_inner(config))
    width = BF16 if config.train.precision == "bf16" else FP32
    logit_rows = rows * tokens if o.ce_chunk <= 0 else min(o.ce_chunk, rows * tokens)
    return rows * (compressor + decompressor + dit) * width + 2 * logit_rows * config.data.vocab_size * FP32


def sampling_bytes(config: Config, batch: int) -> int:
    """Weights that sampling uses and its largest moment, be it inside a DiT block or the logits."""
    m, parts = config.model, parameter_counts(config)
    weights = parts["total"] - parts["compressor"]
    block = (m.latent_len + prefix_len(config)) * (5 * m.hidden + 3 * swiglu_inner(config))
    logits = config.data.token_len * config.data.vocab_size
    return FP32 * (weights + batch * max(block, logits))


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
