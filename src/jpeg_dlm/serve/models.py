"""The models of a server by name, and what each can do."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from jpeg_dlm.api import Model, load
from jpeg_dlm.errors import JpegDlmError, UsageError
from jpeg_dlm.flow.latent_sampler import Watch
from jpeg_dlm.folders.model_folder import BUNDLED
from jpeg_dlm.sampling.batching import BatchingService
from jpeg_dlm.sampling.linear import Dtype
from jpeg_dlm.serve.fields import NEUTRAL, meaningless
from jpeg_dlm.serve.http_errors import ApiError
from jpeg_dlm.serve.requests import SAMPLER_FIELDS, Writing

_HOLE = re.compile(r"\[MASK:(\d+)\]")
REMEMBERED = 256  # sets of sampler options, which take longer to check than to look up


@dataclass(eq=False)
class Served:
    """A loaded model under a name."""

    name: str
    model: Model
    created: int
    has_codec: bool  # whether texts become latents and latents texts

    def __post_init__(self) -> None:
        self._sampler = lru_cache(REMEMBERED)(lambda *options: self.model.sampler_options(**dict(options)))

    @property
    def title(self) -> str:
        return self.model.writer.title

    @property
    def fills_in(self) -> bool:
        """True if texts can contain given tokens: prompts and templates."""
        return "prompts" in self.supports

    @property
    def supports(self) -> frozenset[str]:
        """The kinds of requests that the writer names itself."""
        return self.model.writer.supports

    @property
    def can_edit(self) -> bool:
        return self.has_codec and "edits" in self.supports

    @cached_property
    def option_names(self) -> list[str]:
        """The fields of a request that the sampler has."""
        known = {field.name for field in fields(self.model.config.sampler)}
        return [name for name in SAMPLER_FIELDS if name in known]

    @property
    def has_fast(self) -> bool:
        return self.model.writer.latent_sampler is not None

    def options(self, request: Writing) -> dict[str, Any]:
        """Return the options of the sampler that a request gives; refuse those that it does not have."""
        options = request.options()
        for name in options.keys() - set(self.option_names):
            if options.pop(name) not in NEUTRAL.get(name, ()):
                raise meaningless(name, self.title)
        if request.fast:
            if not self.has_fast:
                raise meaningless("fast", self.title)
            options["fast"] = True
        self._sampler(*sorted(options.items()))  # refuses wrong values before anything waits
        return options

    def submit(
        self, service: BatchingService, request: Writing, n: int, seed: int, first: int = 0, *,
        given: Tensor | None = None, watch: Watch | None = None,
    ) -> Future[Tensor]:  # fmt: skip
        """Request token ids (n, L) of samples `first` to `first + n - 1` of `seed`."""
        options = self.options(request)
        if given is not None and "guides" in self.supports:  # guided sampling depends on more than the writer
            sample = self.model.sample
            return service.call(lambda: sample(n, seed=seed, first=first, given=given, watch=watch, **options), n)
        sampler = self._sampler(*sorted(options.items()))
        return service.submit(self.model.writer, n, sampler, seed, first, given_L=given, watch=watch)

    def given(self, prompt: str | None, template: str | None) -> Tensor | None:
        """Return the row of ids that every text keeps."""
        for name, value in (("prompt", prompt), ("template", template)):
            if value and not self.fills_in:
                raise ApiError(
                    422, f"{self.title} writes whole texts: leave `{name}` out, or use a model that supports prompts.", name,
                    "unsupported_parameter",
                )  # fmt: skip
        for size in _HOLE.findall(template or ""):  # before a list of so many tokens is made
            if len(size) > 6 or int(size) > self.model.config.data.token_len:
                raise ApiError(422, "A hole of the template is longer than a text of this model: make it smaller.", "template")
        return self.model.given(prompt or None, template)

    def need(self, ability: bool, what: str) -> None:
        """Refuse a request that this model cannot answer."""
        if not ability:
            raise ApiError(422, f"{self.title} cannot {what}: use a model that `/v1/models` says can.", "model")

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `/v1/models`."""
        config = self.model.config
        defaults = {name: getattr(config.sampler, name) for name in self.option_names}
        return {
            "id": self.name, "object": "model", "created": self.created, "owned_by": "jpeg-dlm", "title": self.title,
            "tokens": config.data.token_len, "latents": config.model.latent_len if config.rate is not None else None,
            "options": defaults,
            "can": {
                "prompt": self.fills_in, "fast": self.has_fast, "reconstruct": self.has_codec, "interpolate": self.has_codec,
                "embed": self.has_codec, "edit": self.can_edit,
            },
        }  # fmt: skip


Models = Mapping[str, Served]


def find(models: Models, name: str | None) -> Served:
    """Return a model by name, or the first one."""
    if name is None:
        return next(iter(models.values()))
    if name not in models:
        known = ", ".join(models)
        raise ApiError(404, f"There is no model '{name[:80]}': choose one of {known}.", "model", "model_not_found")
    return models[name]


def load_models(
    specs: Sequence[str], device: str | None = None, dtype: Dtype | Literal["exact", "auto"] = "exact"
) -> dict[str, Served]:
    """Load the models of `PATH` or `NAME=PATH`; without any, the bundled one."""
    named: dict[str, Path] = {}
    for spec in specs or [BUNDLED]:
        name, equals, path = spec.partition("=")
        if not equals or Path(spec).exists():
            name, path = Path(spec).resolve().name, spec
        if not name or name in named:
            raise UsageError(f"'{spec}' needs a name of its own: write NAME={path}.")
        named[name] = Path(path)
    return {name: serve_model(name, load(path, device, dtype)) for name, path in named.items()}


def serve_model(name: str, model: Model) -> Served:
    """Load what requests will need: the tokenizer, and the encoder if texts can be encoded."""
    model.tokenizer  # noqa: B018 - a missing tokenizer shall stop the start, not a request
    codec = model.parts.trained is not None and model.parts.writer.latent_sampler is not None
    if codec:
        try:
            model.complete_method()
        except JpegDlmError as error:
            codec = False
            print(f"{name} will write but not encode texts: {error}", file=sys.stderr)
    return Served(name, model, int(time.time()), codec)
