"""The requests of the service. Names and meanings follow the OpenAI conventions where these have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jpeg_dlm.config import LARGEST_INT
from jpeg_dlm.serve.fields import entry

MOST_TEXTS = 64  # of one request
MOST_STEPS = 1024
MOST_INPUTS = 64  # texts to encode in one request
MOST_POINTS = 65
MOST_WATCHED = 4
SAMPLER_FIELDS = ("steps", "solver", "grid", "w", "temperature", "top_k", "top_p")


@dataclass(frozen=True)
class OfModel:
    """The model that shall answer."""

    model: str | None = entry("text", "name of a served model (default: the first one)")


@dataclass(frozen=True)
class Writing(OfModel):
    """What is to be written, and how: the fields of completions and trajectories."""

    prompt: tuple[str, ...] = entry("texts", "how each text begins, for models that support prompts", (), most=MOST_TEXTS)
    template: str | None = entry("text", "text with holes [MASK] or [MASK:n] to fill, for models that support prompts")
    seed: int | None = entry("whole", "text i of a seed is always the same (default: drawn)", least=0, most=LARGEST_INT)
    fast: bool = entry("flag", "few steps, at the times found by tune", False)
    steps: int | None = entry("whole", "sampling steps (default: the model's own)", least=1, most=MOST_STEPS)
    solver: str | None = entry("text", "solver of the sampler (default: the model's own)")
    grid: str | None = entry("text", "spacing of sampling times (default: the model's own)")
    w: float | None = entry("number", "self-conditioning guidance scale (default: the model's own)", least=0, most=1000)
    temperature: float | None = entry("number", "divides the logits, for models that have it", least=0, most=100)
    top_k: int | None = entry(
        "whole", "draw from the k most probable tokens, for models that have it", least=0, most=LARGEST_INT
    )
    top_p: float | None = entry("number", "draw from the most probable tokens, for models that have it", least=0, most=1)

    def options(self) -> dict[str, Any]:
        """The options of the sampler that were given."""
        return {name: value for name in SAMPLER_FIELDS if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Completion(Writing):
    """`POST /v1/completions`"""

    n: int = entry("whole", "texts for each prompt", 1, least=1, most=MOST_TEXTS)
    max_tokens: int | None = entry("whole", "cut texts after so many tokens", least=1, most=LARGEST_INT)
    stop: tuple[str, ...] = entry("texts", "cut texts before these strings", (), most=4)
    echo: bool = entry("flag", "return texts with their prompt", False)
    stream: bool = entry("flag", "send each text when it is done, as server-sent events", False)
    stream_options: dict[str, Any] | None = entry("object", "`include_usage`: send the numbers of tokens at the end")


@dataclass(frozen=True)
class Trajectory(Writing):
    """`POST /v1/trajectory`"""

    n: int = entry("whole", "texts", 1, least=1, most=MOST_WATCHED)
    stream: bool = entry("flag", "send each moment when it is reached, as server-sent events", False)


@dataclass(frozen=True)
class EmbeddingRequest(OfModel):
    """`POST /v1/embeddings`"""

    input: tuple[str, ...] = entry("texts", "texts to encode", (), most=MOST_INPUTS, required=True)
    pooling: str = entry("text", "mean of the latents, or all of them in a row", "mean", choices=("mean", "flat"))
    encoding_format: str = entry("text", "numbers, or float32 in base64", "float", choices=("float", "base64"))
    dimensions: int | None = entry("whole", "must be what the model has", least=1, most=LARGEST_INT)


@dataclass(frozen=True)
class Reconstruction(OfModel):
    """`POST /v1/reconstruct`"""

    input: tuple[str, ...] = entry("texts", "texts to encode and decode again", (), most=MOST_INPUTS, required=True)


@dataclass(frozen=True)
class Interpolation(OfModel):
    """`POST /v1/interpolate`"""

    first: str = entry("text", "the text at one end", "", required=True)
    second: str = entry("text", "the text at the other end", "", required=True)
    points: int = entry("whole", "texts along the way, ends included", 5, least=2, most=MOST_POINTS)


@dataclass(frozen=True)
class Edit(OfModel):
    """`POST /v1/edit`"""

    input: str = entry("text", "the text to vary", "", required=True)
    noise: float = entry("number", "how much noise its latents get", 0.4, least=0, most=1)
    n: int = entry("whole", "variations", 1, least=1, most=MOST_TEXTS)
    seed: int | None = entry("whole", "variation i of a seed is always the same (default: drawn)", least=0, most=LARGEST_INT)
