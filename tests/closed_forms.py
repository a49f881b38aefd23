"""Parameters and multiply-accumulates of JPEG-DLM by formula: what measurements are held against.

Letters as elsewhere: L tokens, N latents, D latent width, F feature width, H hidden width, V vocabulary.
"""


def linear(dim_in, dim_out, bias=True):
    return dim_in * dim_out + (dim_out if bias else 0)


def codec_inner(config):
    return 4 * config.model.latent_dim


def swiglu_inner(config):
    return int(4 * config.model.hidden * 2 / 3)


def prefix_len(config):
    return config.model.time_tokens + config.model.sc_tokens + config.model.mode_tokens


def attention_macs(queries, keys, width):
    return 2 * queries * keys * width


# ---------------------------------------------------------------- parameters of JPEG-DLM


def own_parameters(config):
    """By part, without encoder and target."""
    m, f, d, h = config.model, config.encoder.feature_dim, config.model.latent_dim, config.model.hidden
    ffn = 2 * d + linear(d, codec_inner(config)) + linear(codec_inner(config), d)
    layer = 2 * linear(d, d, False) + 2 * linear(d, 2 * d, False) + 2 * d + 2 * (d // m.codec_heads) + ffn
    tables = (m.latent_len + config.data.token_len) * d
    bottleneck = linear(f, m.bottleneck_dim, False) + linear(m.bottleneck_dim, d, False)
    attention = linear(h, 3 * h) + 2 * (h // m.heads) + linear(h, h)
    block = attention + linear(h, 2 * swiglu_inner(config)) + linear(swiglu_inner(config), h) + 2 * h
    inputs = linear(2 * d, d) + linear(d, m.bottleneck_dim, False) + linear(m.bottleneck_dim, h)
    embedders, heads = 2 * (linear(m.freq_dim, h) + linear(h, h)), 2 * (h + linear(h, d))
    dit = prefix_len(config) * h + inputs + embedders + m.depth * block + heads
    parts = {
        "compressor": tables + bottleneck + m.codec_layers * layer + 2 * d,
        "decompressor": d + ffn + 2 + tables + m.codec_layers * (layer + 4) + bottleneck,
        "dit": dit,
        "unembed_proj": linear(f, m.proj_dim),
        "lm_head": linear(m.proj_dim, config.data.vocab_size),
    } | ({} if m.shared else {"predictor": dit})
    flow = dit + parts["unembed_proj"] + parts["lm_head"]
    return parts | {"dit_and_projection": flow, "total": sum(parts.values())}


# ---------------------------------------------------------------- operations of one sample


def dit_macs(config, length, dim):
    """One evaluation: (all, of these attention)."""
    m, s = config.model, length + prefix_len(config)
    inputs = length * (2 * dim * dim + dim * m.bottleneck_dim + m.bottleneck_dim * m.hidden)
    embedders = 2 * (m.freq_dim * m.hidden + m.hidden**2)
    block = s * (4 * m.hidden**2 + 3 * m.hidden * swiglu_inner(config))
    attention = m.depth * attention_macs(s, s, m.hidden)
    return inputs + embedders + m.depth * block + attention + length * m.hidden * dim, attention


def query_macs(config):
    """The network of the decompressor's base query, once; the released code runs it for every token."""
    return 2 * config.model.latent_dim * codec_inner(config)


def own_sampling_macs(config):
    """By part, with `attention` and `total`, as the released code does it."""
    m, tokens, f = config.model, config.data.token_len, config.encoder.feature_dim
    n, d = m.latent_len, m.latent_dim
    evaluations = config.sampler.evaluations(tokens)
    dit, dit_attention = dit_macs(config, n, d)
    attention = attention_macs(tokens, tokens + n, d)
    layer = tokens * 4 * d * d + n * 2 * d * d + attention + tokens * 2 * d * codec_inner(config)
    parts = {
        "dit": evaluations * dit,
        "decompressor": tokens * query_macs(config) + m.codec_layers * layer + tokens * m.bottleneck_dim * (d + f),
        "projection": tokens * m.proj_dim * (f + config.data.vocab_size),
    }
    return parts | {"attention": evaluations * dit_attention + m.codec_layers * attention, "total": sum(parts.values())}
