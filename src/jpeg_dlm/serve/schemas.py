"""The requests of the service. Names and meanings follow the OpenAI conventions where these have them."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

LONGEST_TEXT = 20_000  # characters
LARGEST = (1 << 53) - 1  # JSON has no larger numbers that every reader gets right, this description's included
MOST_TEXTS = 64  # of one request
MOST_MESSAGES = 1024  # of a chat (assumed)
MOST_STEPS = 1024
MOST_WATCHED = 4
DRAWN_SEEDS = 2**31  # a seed that nobody chose is below it, so that people can copy it
SEED = "text i of a seed is always the same; drawn if absent"
SAMPLER_FIELDS = ("steps", "solver", "grid", "w", "temperature", "top_k", "top_p")

Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
# Only the description has these bounds: a blank text is refused in a sentence of its own.
Words = Annotated[Text, Field(json_schema_extra={"minLength": 1, "pattern": r"\S"})]
Word = Annotated[str, Field(min_length=1, max_length=100)]
Seed = Annotated[int, Field(ge=0, le=LARGEST, default_factory=lambda: secrets.randbelow(DRAWN_SEEDS), description=SEED)]
Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=MOST_TEXTS)]
Inputs = Words | Annotated[list[Words], Field(min_length=1, max_length=MOST_TEXTS)]


def as_list(texts: Texts | Inputs | None) -> list[str]:
    """Return one text or several as a list."""
    return [] if texts is None else [texts] if isinstance(texts, str) else texts


class Request(BaseModel):
    """The fields of every request; null means absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    model: Text | None = Field(None, description="name of a served model (default: the first one)")
    user: Any = Field(None, description="ignored")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if len(values) > len(cls.model_fields):  # there would be an error for each field, which takes long
            raise ValueError(f"it has {len(values)} fields of at most {len(cls.model_fields)}")
        return {name: value for name, value in values.items() if value is not None}


class Sampling(Request):
    """The fields of all requests that write: the number of texts, and options of the sampler."""

    n: int = Field(1, ge=1, le=MOST_TEXTS, description="texts for each prompt")
    seed: Seed
    stream: bool = Field(False, description="send each text, or each step, when it is done, as server-sent events")
    steps: int | None = Field(None, ge=1, le=MOST_STEPS, description="sampling steps; this and the following: the model's own")
    solver: Word | None = Field(None, description="solver of the sampler")
    grid: Word | None = Field(None, description="spacing of sampling times")
    w: float | None = Field(None, ge=0, le=1000, description="self-conditioning guidance scale")
    temperature: float | None = Field(None, ge=0, le=100, description="divides the logits, for models that have it")
    top_k: int | None = Field(None, ge=0, le=LARGEST, description="draw from the k most probable tokens")
    top_p: float | None = Field(None, ge=0, le=1, description="draw from the most probable tokens")


class Writing(Sampling):
    """The fields of completions and trajectories: what the texts are made of."""

    prompt: Texts | None = Field(None, description="how each text begins, for models that support prompts")
    template: Text | None = Field(None, description="text with holes [MASK] or [MASK:n] to fill")
    source: Text | None = Field(None, description="what each text is the target of, for models of pairs, which need one")


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = Field(False, description="send the numbers of tokens at the end")


class Answering(Request):
    """The fields of completions and chats: where texts are cut, and how they are sent."""

    max_tokens: int | None = Field(None, ge=1, le=LARGEST, description="cut texts after so many tokens")
    stop: Text | Annotated[list[Text], Field(min_length=1, max_length=4)] | None = Field(
        None, description="cut texts before these strings"
    )
    stream_options: StreamOptions | None = None
    # Fields of the conventions that have no meaning here, at the values that say nothing.
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    logit_bias: dict[str, float] | None = Field(None, max_length=0)
    presence_penalty: float | None = Field(None, ge=0, le=0)
    service_tier: Literal["auto", "default"] | None = None


class Completion(Writing, Answering):
    """Texts, at once or each when it is done."""

    echo: bool = Field(False, description="return texts with their prompt")
    best_of: Literal[1] | None = None
    logprobs: Literal[0] | None = None
    suffix: str | None = Field(None, max_length=0)


class Message(BaseModel):
    """A message of a chat; its other fields are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _is_text(cls, content: Any) -> Any:
        if not isinstance(content, str | None):
            raise PydanticCustomError("text", "the content of a message must be text")
        return content


class Chat(Sampling, Answering):
    """Answers to the last message of a user, the only one that is read: a source of a model of pairs, else a prompt."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1, le=LARGEST, description="the newer name of `max_tokens`")
    logprobs: Literal[False] | None = None

    def text(self) -> str | None:
        """Return the last message of a user."""
        return next((message.content for message in reversed(self.messages) if message.role == "user"), None)

    def completion(self, **given: str) -> Completion:
        """Return the request for completions with the same fields, and these."""
        fields = self.model_dump(exclude={"messages", "max_completion_tokens", "logprobs"})
        return Completion.model_validate(fields | {"max_tokens": self.max_completion_tokens or self.max_tokens} | given)


class Trajectory(Writing):
    """The texts that a model would write if it had to stop after each step."""

    prompt: Text | None = Field(None, description="how the text begins, for models that support prompts")
    n: int = Field(1, ge=1, le=MOST_WATCHED, description="texts")


class EmbeddingRequest(Request):
    """Latents of texts."""

    input: Inputs = Field(description="texts to encode")
    pooling: Literal["mean", "flat"] = Field("mean", description="mean of the latents, or all of them in a row")
    encoding_format: Literal["float", "base64"] = Field("float", description="numbers, or float32 in base64")
    dimensions: int | None = Field(None, ge=1, le=LARGEST, description="must be what the model has")


class Reconstruction(Request):
    """Texts that are encoded to latents and decoded again."""

    input: Inputs = Field(description="texts to encode and decode again")


class Interpolation(Request):
    """Points between the latents of two texts."""

    first: Words = Field(description="the text at one end")
    second: Words = Field(description="the text at the other end")
    points: int = Field(5, ge=2, le=65, description="texts along the line, ends included")


class Edit(Request):
    """Variations of a text."""

    input: Words = Field(description="the text to vary")
    noise: float = Field(0.4, ge=0, le=1, description="how much noise its latents get")
    n: int = Field(1, ge=1, le=MOST_TEXTS, description="variations")
    seed: Seed
