"""Slow second versions of the networks, written from the description of the released code, one row and one head at a time.

Each takes a state dict `p` under the released names and reads every size from its tensors; only the number of heads is
given. They share no code with the package, so agreement means something.
"""

import math

import torch

# ---------------------------------------------------------------- pieces


def under(p, prefix):
    """The part of a state dict below a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in p.items() if name.startswith(prefix)}


def count(p, prefix):
    """How many numbered layers a state dict has below a prefix."""
    return len({name.removeprefix(prefix).split(".")[0] for name in p if name.startswith(prefix)})


def affine(p, name, x):
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def silu(x):
    return x / (1 + torch.exp(-x))


def gelu(x):
    """The exact one, through the error function."""
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


# ---------------------------------------------------------------- the DiT


def rms(x, weight, eps=1e-6):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def embedded(p, name, value):
    half = p[f"{name}.mlp_0.weight"].shape[1] // 2
    freqs = [math.exp(-math.log(1e4) * k / half) for k in range(half)]
    e = torch.tensor([math.cos(value * f) for f in freqs] + [math.sin(value * f) for f in freqs])
    return affine(p, f"{name}.mlp_2", silu(affine(p, f"{name}.mlp_0", e)))


def turn(vector, position, base=10_000.0):
    out = vector.clone()
    for i in range(len(vector) // 2):
        a = position * base ** (-2 * i / len(vector))
        x, y = vector[2 * i], vector[2 * i + 1]
        out[2 * i], out[2 * i + 1] = x * math.cos(a) - y * math.sin(a), x * math.sin(a) + y * math.cos(a)
    return out


def slow_attention(p, name, heads, prefix, x):
    hidden = x.shape[1]
    size = hidden // heads
    q, k, v = affine(p, f"{name}.qkv", x).split(hidden, dim=-1)
    mixed = torch.zeros_like(x)
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        qh, kh = rms(q[:, part], p[f"{name}.q_norm.weight"]), rms(k[:, part], p[f"{name}.k_norm.weight"])
        for i in range(prefix, len(x)):
            qh[i], kh[i] = turn(qh[i], i - prefix), turn(kh[i], i - prefix)
        mixed[:, part] = torch.softmax(qh @ kh.T / math.sqrt(size), dim=-1) @ v[:, part]
    return affine(p, f"{name}.proj", mixed)


def turn_halves(x, position):
    """Channel i and channel i + half are the two parts of a complex number that turns with the position."""
    half = len(x) // 2
    numbers = torch.complex(x[:half], x[half:])
    turned = numbers * torch.exp(1j * position * 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half))
    return torch.cat([turned.real, turned.imag])


def slow_half_attention(x_LH, qkv, out, heads, is_causal=False, cap=0.0):
    """Attention of the published discrete systems and of COSMOS: without biases and norms of queries and keys."""
    hidden = x_LH.shape[1]
    width, mixed = hidden // heads, torch.zeros_like(x_LH)
    for head in range(heads):
        rows = [slice(part * hidden + head * width, part * hidden + (head + 1) * width) for part in range(3)]
        q, k = ([turn_halves(qkv[r] @ x, i) for i, x in enumerate(x_LH)] for r in rows[:2])
        v = [qkv[rows[2]] @ x for x in x_LH]
        for i in range(len(x_LH)):
            seen = i + 1 if is_causal else len(x_LH)
            scores = torch.stack([q[i] @ k[j] / math.sqrt(width) for j in range(seen)])
            weights = torch.exp(cap * torch.tanh(scores / cap) if cap else scores)
            mixed[i, head * width : (head + 1) * width] = sum(w * u for w, u in zip(weights / weights.sum(), v, strict=False))
    return mixed @ out.T


def slow_dit(p, heads, z, t, s, w, decode):
    """One row: latents (N, D), numbers t and w."""
    x = affine(p, "in_proj.proj2", affine(p, "in_proj.proj1", affine(p, "self_cond_proj", torch.cat([z, s], dim=-1))))
    time = p["t_emb_tokens"][0] + embedded(p, "t_embedder", t)
    scale = p["sc_tokens"][0] + embedded(p, "sc_embedder", w)
    mode = p["mode_tokens"][0] * (1.0 if decode else 0.0)
    prefix = len(time) + len(scale) + len(mode)
    x = torch.cat([time, scale, mode, x])
    for i in range(count(p, "blocks.")):
        x = x + slow_attention(p, f"blocks.{i}.attn", heads, prefix, rms(x, p[f"blocks.{i}.norm1.weight"]))
        both = affine(p, f"blocks.{i}.mlp.w12", rms(x, p[f"blocks.{i}.norm2.weight"]))
        gate, up = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
        x = x + affine(p, f"blocks.{i}.mlp.w3", silu(gate) * up)
    head = "decode_head" if decode else "denoise_head"
    return affine(p, f"{head}.linear", rms(x[prefix:], p[f"{head}.norm_final.weight"]))


# ---------------------------------------------------------------- the codec, with the released scale of positions


def codec_norm(x, gamma):
    """x / max(|x| d^-1/2, 1e-8) * gamma, row by row."""
    rows = [v / max(v.norm().item() * len(v) ** -0.5, 1e-8) for v in x]
    return torch.stack(rows) * gamma


def positions(p, name):
    table = p[f"{name}.weight"]
    return table * table.shape[1] ** -0.5


def ffn(p, name, x):
    mean, var = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    x = (x - mean) / torch.sqrt(var + 1e-5) * p[f"{name}.net.0.weight"] + p[f"{name}.net.0.bias"]
    return affine(p, f"{name}.net.4", gelu(affine(p, f"{name}.net.1", x)))


def codec_attention(p, name, heads, x, ctx, context_first):
    dim = x.shape[1]
    size = dim // heads
    x, ctx = codec_norm(x, p[f"{name}.norm_latents.gamma"]), codec_norm(ctx, p[f"{name}.norm_ctx.gamma"])
    own, other = x @ p[f"{name}.to_kv_latents.weight"].T, ctx @ p[f"{name}.to_kv_ctx.weight"].T
    kv = torch.cat([other, own] if context_first else [own, other])
    k, v = kv[:, :dim], kv[:, dim:]
    q = x @ p[f"{name}.to_q.weight"].T
    mixed = []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        qh, kh = codec_norm(q[:, part], p[f"{name}.q_norm.gamma"]), codec_norm(k[:, part], p[f"{name}.k_norm.gamma"])
        mixed.append(torch.softmax(qh @ kh.T / math.sqrt(size), dim=-1) @ v[:, part])
    return torch.cat(mixed, dim=-1) @ p[f"{name}.out.weight"].T


def slow_compress(p, heads, h, kept=None):
    """Features (L, F) of one row; `kept` are the token positions that exist."""
    ctx = h @ p["in_proj.down.weight"].T @ p["in_proj.up.weight"].T + positions(p, "pos_emb")
    ctx = ctx if kept is None else ctx[kept]
    x = codec_norm(p["latents"], p["latent_norm.gamma"])
    for i in range(count(p, "layers.")):
        x = x + codec_attention(p, f"layers.{i}.attn", heads, x, ctx, context_first=False)
        x = x + ffn(p, f"layers.{i}.ffn", x)
    return codec_norm(x, p["output_norm.gamma"])


def gate(p, name):
    return 1 + p[f"{name}.scale_mlp.weight"].item() * 1 + p[f"{name}.scale_mlp.bias"].item()


def slow_decompress(p, heads, z):
    """Latents (N, D) of one row to features (L, F)."""
    x = p["base_query"][0].repeat(len(p["pos_emb.weight"]), 1)
    x = gate(p, "query_gate") * ffn(p, "query_ffn", x) + positions(p, "pos_emb")
    ctx = z + positions(p, "pos_latent")
    for i in range(count(p, "layers.")):
        x = x + gate(p, f"layers.{i}.attn_gate") * codec_attention(p, f"layers.{i}.attn", heads, x, ctx, context_first=True)
        x = x + gate(p, f"layers.{i}.ffn_gate") * ffn(p, f"layers.{i}.ffn", x)
    return x @ p["out_proj.down.weight"].T @ p["out_proj.up.weight"].T


# ---------------------------------------------------------------- the whole model, from latents to tokens


def slow_tokens(p, codec_heads, heads, z, w):
    """The decode evaluation of one row: no self-conditioning, w fed all the same; then greedy tokens."""
    zhat = slow_dit(under(p, "dit."), heads, z, 1.0, torch.zeros_like(z), w, decode=True)
    h = slow_decompress(under(p, "decompressor."), codec_heads, zhat / p["latent_scale"] + p["latent_mean"])
    return affine(p, "lm_head", gelu(affine(p, "unembed_proj", h))).argmax(-1)


# ---------------------------------------------------------------- Llama, in the names and layout of llama.cpp


def made_up_llama(vocabulary, width, inner, layers, heads, kv_heads, tied):
    """Random tensors, large enough that every one of them matters."""
    g, narrow = torch.Generator().manual_seed(0), width * kv_heads // heads
    matrices = {
        "attn_q": (width, width), "attn_k": (narrow, width), "attn_v": (narrow, width), "attn_output": (width, width),
        "ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner),
    }  # fmt: skip
    shapes = {"token_embd": (vocabulary, width), "output_norm": (width,)} | ({} if tied else {"output": (vocabulary, width)})
    for i in range(layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in matrices.items()}
        shapes |= {f"blk.{i}.{name}_norm": (width,) for name in ("attn", "ffn")}
    return {f"{name}.weight": 0.3 * torch.randn(shape, generator=g) + (len(shape) == 1) for name, shape in shapes.items()}


def slow_llama(p, heads, kv_heads, base, eps, tokens):
    """Logits (L, V) of one row; rotary positions turn neighboring channels."""
    x = p["token_embd.weight"][tokens]
    for i in range(count(p, "blk.")):
        block = under(p, f"blk.{i}.")
        y = rms(x, block["attn_norm.weight"], eps)
        q, k, v = (affine(block, f"attn_{name}", y) for name in "qkv")
        size, mixed = q.shape[1] // heads, torch.zeros_like(q)
        for head in range(heads):
            own, shared = (slice(h * size, (h + 1) * size) for h in (head, head * kv_heads // heads))
            keys = torch.stack([turn(k[n, shared], n, base) for n in range(len(x))])
            for n in range(len(x)):
                weights = torch.softmax(keys[: n + 1] @ turn(q[n, own], n, base) / math.sqrt(size), dim=-1)
                mixed[n, own] = weights @ v[: n + 1, shared]
        x = x + affine(block, "attn_output", mixed)
        y = rms(x, block["ffn_norm.weight"], eps)
        x = x + affine(block, "ffn_down", silu(affine(block, "ffn_gate", y)) * affine(block, "ffn_up", y))
    return affine(p, "output" if "output.weight" in p else "token_embd", rms(x, p["output_norm.weight"], eps))
