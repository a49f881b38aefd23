"""Systems at several lengths and rates, and what a text of theirs costs by counting: parameters, operations and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import comb, factorial, prod
from typing import Any

import torch

from jpeg_dlm.accounting.costs import build_weightless, parameter_parts, sampling_cost
from jpeg_dlm.accounting.info import as_released
from jpeg_dlm.config import Config
from jpeg_dlm.config_io import override
from jpeg_dlm.evaluation.paper import OWN, paper_tables
from jpeg_dlm.methods.ar import Ar
from jpeg_dlm.methods.base import FREE
from jpeg_dlm.methods.registry import for_method

UNCACHED, CACHED = "AR", "AR, KV cache"
FULL = "ELF, full length"  # one latent for each token and no codec
SYSTEMS = (OWN, FULL, UNCACHED, CACHED)
LEAST = (2, 1)  # tokens and latents of the shortest text that is measured
LONGEST = 1 << 22  # where the search for the length at which attention dominates gives up


@dataclass(frozen=True)
class Point:
    """A system at one length, and its rate where it has one."""

    system: str
    config: Config

    @property
    def token_len(self) -> int:
        return self.config.data.token_len

    @property
    def key(self) -> tuple[str, int, int | None]:
        return self.system, self.token_len, getattr(self.config.model, "latent_len", None)


def at_length(base: Config, system: str, token_len: int, rate: float) -> Point:
    """A system under a preset's conditions with texts of `token_len` tokens."""
    latent_len = max(1, round(rate * token_len))
    config = replace(
        base, data=replace(base.data, token_len=token_len), model=replace(base.model, latent_len=min(latent_len, token_len))
    )
    if system == FULL:
        config = for_method(config, "elf")
    if system in (UNCACHED, CACHED):
        config = override(for_method(config, "ar"), {"sampler.kv_cache": system == CACHED})
    return Point(system, config)


def macs_of(point: Point) -> tuple[int, int]:
    """Return the operations of one text, and how many of them are attention.

    They are a polynomial in L and N, of degree 3 for AR without cache, else 2; Newton's differences of short texts give it.
    """
    lengths = point.token_len, getattr(point.config.model, "latent_len", None)
    steps = [0 if length is None else length - least for length, least in zip(lengths, LEAST, strict=True)]
    terms = [(_choose(steps[0], i) * _choose(steps[1], j), found) for (i, j), found in _differences(at_least(point)).items()]
    return sum(c * macs for c, (macs, _) in terms), sum(c * attention for c, (_, attention) in terms)


def at_least(point: Point) -> Point:
    """Return a point with the shortest texts that are measured."""
    return _resized(point, *LEAST)


def _resized(point: Point, token_len: int, latent_len: int) -> Point:
    config = replace(point.config, data=replace(point.config.data, token_len=token_len))
    if hasattr(config.model, "latent_len"):
        config = replace(config, model=replace(config.model, latent_len=latent_len))
    return replace(point, config=config)


@lru_cache(maxsize=64)
def _differences(least: Point) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the differences of i-th order in L and j-th in N, of all operations and of those of attention."""
    degree, latents = 3 if least.system == UNCACHED else 2, hasattr(least.config.model, "latent_len")
    places = [(i, j) for i in range(degree + 1) for j in range(degree - i + 1 if latents else 1)]
    found = {(i, j): _measured_macs(_resized(least, LEAST[0] + i, LEAST[1] + j)) for i, j in places}

    def difference(i: int, j: int, which: int) -> int:
        return sum(
            (-1) ** (i + j - a - b) * comb(i, a) * comb(j, b) * found[a, b][which] for a in range(i + 1) for b in range(j + 1)
        )

    return {(i, j): (difference(i, j, 0), difference(i, j, 1)) for i, j in places}


def _measured_macs(point: Point) -> tuple[int, int]:
    cost = sampling_cost(point.config, prepare=as_released if point.system == OWN else None)
    return cost.macs, cost.attention


def _choose(n: int, k: int) -> int:
    """Return n (n - 1) ... (n - k + 1) / k!, also of a negative n."""
    return prod(n - i for i in range(k)) // factorial(k)


def memory_of(point: Point) -> dict[str, int]:
    """Return bytes of sampling one text in fp32; AR without cache holds most when it reads the whole text at the end."""
    config, cache = point.config, 0
    if point.system == CACHED:
        cache, config = kv_cache_bytes(point), at_least(point).config
    given_BL = None
    if point.system == UNCACHED:
        given_BL = torch.zeros(1, point.token_len, dtype=torch.long)
        given_BL[:, -1] = FREE
    cost = sampling_cost(config, given_BL=given_BL)
    beside = cost.peak - (kv_cache_bytes(at_least(point)) if point.system == CACHED else 0)
    return {"weights": cost.weights, "activations": beside, "kv_cache": cache}


def kv_cache_bytes(point: Point) -> int:
    """Return the bytes of AR's keys and values of one text."""
    method = build_weightless(point.config)
    assert isinstance(method, Ar)
    layers = method.backbone.new_cache(1, point.token_len + method.before)
    return sum(layer.k_BKLd.nbytes + layer.v_BKLd.nbytes for layer in layers)


def counted(point: Point) -> dict[str, Any]:
    """Return everything that needs no clock."""
    own = point.system == OWN
    parameters = parameter_parts(build_weightless(point.config))["total"]
    macs, attention = macs_of(point)
    return {
        "system": point.system, "token_len": point.token_len, "latent_len": point.key[2],
        "rate": point.config.rate if own else None, "parameters": parameters,
        "evaluations": point.config.sampler.evaluations(point.token_len), "macs": macs, "attention_share": attention / macs,
        "memory": memory_of(point), "paper_macs_T": paper_macs(point),
    }  # fmt: skip


def paper_macs(point: Point) -> float | None:
    """The paper's sampling compute, for the very sizes that it states; its full length is an estimate with codec."""
    system = paper_tables()["system"].get(point.config.preset)
    if system is None or point.token_len != system["token_len"]:
        return None
    named = {system["latent_len"]: "macs_compressed_T", system["token_len"]: "macs_full_T"}
    return system[named[point.key[2]]] if point.system == OWN and point.key[2] in named else None


def half_attention_length(share: Callable[[int], float]) -> int | None:
    """The shortest length at which attention is more than half of the operations; None if there is none in sight."""
    if share(LONGEST) <= 0.5:
        return None
    low, high = 0, LONGEST  # the share grows with the length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if share(middle) > 0.5 else (middle, high)
    return high


def attention_share(base: Config, system: str, rate: float) -> Callable[[int], float]:
    """Share of the operations of a text by its length."""

    def share(token_len: int) -> float:
        macs, attention = macs_of(at_length(base, system, token_len, rate))
        return attention / macs

    return share
