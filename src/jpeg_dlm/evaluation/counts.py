"""Parameters and multiply-accumulates of a config, by formula: nothing is built and torch is not needed.

Letters as elsewhere: L tokens, N latents, D latent width, F feature width, H hidden width, V vocabulary, K solver steps.
One multiply-accumulate counts as one operation, as in the paper's "sampling compute". Most functions are of JPEG-DLM; the
last part is of what it is held against: flow matching at full length (ELF) and one token after the other (AR).
"""

from __future__ import annotations

from jpeg_dlm.config import Config


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


def dit_attention_macs(config: Config, latent_len: int) -> int:
    """The part of `dit_macs` that grows with the square of the length."""
    s = latent_len + prefix_len(config)
    return config.model.depth * attention_macs(s, s, config.model.hidden)


def dit_macs(config: Config, latent_len: int, latent_dim: int | None = None) -> int:
    """One evaluation of the network on `latent_len` latents; only one of its two heads runs."""
    m, n, s = config.model, latent_len, latent_len + prefix_len(config)
    d = m.latent_dim if latent_dim is None else latent_dim
    inputs = n * (2 * d * d + d * m.bottleneck_dim + m.bottleneck_dim * m.hidden)
    embedders = 2 * (m.freq_dim * m.hidden + m.hidden * m.hidden)
    block = s * (4 * m.hidden**2 + 3 * m.hidden * swiglu_inner(config))
    return inputs + embedders + m.depth * block + dit_attention_macs(config, n) + n * m.hidden * d


def perceiver_macs(config: Config, queries: int, context: int) -> int:
    """The layers of compressor or decompressor: queries attend to themselves and to a context."""
    m, d = config.model, config.model.latent_dim
    projections = queries * 4 * d * d + context * 2 * d * d  # q, out, own keys and values; those of the context
    layer = projections + attention_macs(queries, queries + context, d) + queries * 2 * d * codec_inner(config)
    return m.codec_layers * layer


def compressor_macs(config: Config) -> int:
    """L token features to N latents."""
    m, tokens = config.model, config.data.token_len
    bottleneck = tokens * m.bottleneck_dim * (config.encoder.feature_dim + m.latent_dim)
    return bottleneck + perceiver_macs(config, m.latent_len, tokens)


def query_macs(config: Config) -> int:
    """The feed-forward network of the decompressor's base query, once."""
    return 2 * config.model.latent_dim * codec_inner(config)


def decompressor_attention_macs(config: Config, latent_len: int) -> int:
    """The part of `decompressor_macs` that grows with the square of the length."""
    m, tokens = config.model, config.data.token_len
    return m.codec_layers * attention_macs(tokens, tokens + latent_len, m.latent_dim)


def decompressor_macs(config: Config, latent_len: int) -> int:
    """L token queries attend to themselves and to the latents.

    The released code repeats the base query L times and sends every copy through its feed-forward network, which is
    counted here as there; ours sends it once and repeats the result, so it does L - 1 of those passes fewer.
    """
    m, tokens = config.model, config.data.token_len
    bottleneck = tokens * m.bottleneck_dim * (m.latent_dim + config.encoder.feature_dim)
    return tokens * query_macs(config) + perceiver_macs(config, tokens, latent_len) + bottleneck


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


def sampling_attention_macs(config: Config) -> int:
    """The part of `sampling_macs` that grows with the square of the length."""
    n, evaluations = config.model.latent_len, config.sampler.evaluations(config.data.token_len)
    return evaluations * dit_attention_macs(config, n) + decompressor_attention_macs(config, n)


def tokens_per_step(config: Config) -> int:
    """Tokens behind one optimizer step."""
    t = config.train
    return t.batch * t.accumulation * t.devices * config.data.token_len


# ---------------------------------------------------------------- ELF and AR


def elf_macs(config: Config) -> int:
    """One evaluation of ELF's network: the DiT on a feature vector for each token."""
    return dit_macs(config, config.data.token_len, config.encoder.feature_dim)


def elf_logits_macs(config: Config) -> int:
    """Hidden states to logits at every token."""
    m = config.model
    return config.data.token_len * m.proj_dim * (m.hidden + config.data.vocab_size)


def elf_sampling_macs(config: Config) -> tuple[int, int]:
    """(all, of these attention) of one sample of ELF."""
    length = config.data.token_len
    evaluations = config.sampler.evaluations(length)
    return evaluations * elf_macs(config) + elf_logits_macs(config), evaluations * dit_attention_macs(config, length)


def network_ids(config: Config) -> int:
    """Ids of a network over tokens; its mask may come after those of the tokenizer."""
    return config.data.vocab_size + (getattr(config.model, "mask_id", 0) == -1) + getattr(config.model, "extra_ids", 0)


def transformer_macs(config: Config) -> int:
    """Linear maps of one token in the layers of the transformer that AR and the discrete systems share."""
    m = config.model
    return m.depth * (4 * m.hidden**2 + 2 * m.hidden * int(m.hidden * m.mlp_ratio))


def ar_reads(config: Config) -> int:
    """Positions whose next token is predicted: all, but for a start token that is one of the row's own."""
    return config.data.token_len - (config.model.start_id != -1)


def ar_sampling_macs(config: Config) -> tuple[int, int]:
    """(all, of these attention) of one sample of AR, with or without KV cache as its sampler says.

    Evaluation j has j tokens to read: with the cache one of them is new and attends to j keys, without it all j are read
    again. A causal mask is counted like full attention, as the products of a plain kernel are.
    """
    m, n = config.model, ar_reads(config)
    ones, squares = n * (n + 1) // 2, n * (n + 1) * (2 * n + 1) // 6  # sums of j and of j * j up to n
    tokens, pairs = (n, ones) if config.sampler.kv_cache else (ones, squares)
    attention = m.depth * attention_macs(1, 1, m.hidden) * pairs
    return tokens * transformer_macs(config) + n * m.hidden * network_ids(config) + attention, attention
