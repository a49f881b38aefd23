"""The models of a server by name, and what each can do."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from jpeg_dlm.api import Backend, Model, load
from jpeg_dlm.export.onnx_model import Precision
from jpeg_dlm.flow.sampler import Watch
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.serve.batching import Abandoned, BatchingService
from jpeg_dlm.serve.http import ApiError
from jpeg_dlm.serve.schemas import SAMPLER_FIELDS, Writing
from jpeg_dlm.util.errors import JpegDlmError, UsageError

NEUTRAL_OPTIONS = {"temperature": 1, "top_p": 1}  # values that OpenAI's clients send to every model


@dataclass(eq=False)
class Served:
    """A loaded model under a name."""

    name: str
    model: Model
    created: int
    has_codec: bool  # whether texts become latents and latents texts

    @property
    def title(self) -> str:
        return self.model.writer.title

    @property
    def reads_sources(self) -> bool:
        """Whether it is a model of pairs, which writes targets of sources."""
        return self.model.config.data.source_len > 0

    @cached_property
    def option_names(self) -> list[str]:
        """The fields of a request that the sampler has."""
        known = {field.name for field in fields(self.model.config.sampler)}
        return [name for name in SAMPLER_FIELDS if name in known]

    def sampler(self, request: Writing) -> Any:
        """Return the sampler's options with those of a request in place; refuse those that it does not have."""
        options = request.model_dump(include=set(SAMPLER_FIELDS), exclude_none=True)
        for name in options.keys() - set(self.option_names):
            if options.pop(name) != NEUTRAL_OPTIONS.get(name):
                sentence = f"`{name}` has no meaning for {self.title}: leave it out."
                raise ApiError(422, sentence, name, "unsupported_parameter")
        return self.model.sampler_options(**options)

    def source_row(self, request: Writing) -> Batch | None:
        """Return a request's source as a batch of one row; refuse one that has no meaning for the model, or is missing."""
        if not self.reads_sources:
            if request.source is not None:
                sentence = f"`source` has no meaning for '{self.name}', which was not trained on pairs: leave it out."
                raise ApiError(422, sentence, "source", "unsupported_parameter")
            return None
        if request.source is None:
            raise ApiError(422, f"'{self.name}' writes targets of sources: send one as `source`.", "source")
        for name in ("prompt", "template"):
            if getattr(request, name):
                raise ApiError(422, f"`{name}` has no meaning beside a source: leave it out.", name, "unsupported_parameter")
        row_1S = self.model.source_rows(request.source)
        return Batch(row_1S, row_1S != self.model.tokenizer.pad_id)

    def submit(
        self, service: BatchingService, request: Writing, fixed: Tensor | None, watch: Watch | None = None
    ) -> list[Future[Tensor]]:
        """Request the token ids of n texts, in one future or in several.

        Texts that are watched or guided do not share batches: they need decodings of their own, or more than the networks.
        """
        n, seed, sampler, source = request.n, request.seed, self.sampler(request), self.source_row(request)
        if watch is None and (fixed is None or "guides" not in self.model.supports):
            return service.submit(self.model.writer, range(n), sampler, seed, fixed, source)
        sources_NS = None if source is None else source.tokens_BL.expand(n, -1)

        def sample(future: Future[Tensor]) -> Tensor:
            def watch_or_stop(*step: Any) -> None:
                if future.cancelled():
                    raise Abandoned
                if watch:
                    watch(*step)

            return self.model.sample(n, seed=seed, fixed=fixed, watch=watch_or_stop, source=sources_NS, **vars(sampler))

        return [service.call(sample, n)]

    @property
    def can(self) -> dict[str, bool]:
        """The kinds of requests that the model answers."""
        codec = dict.fromkeys(("embed", "reconstruct", "interpolate"), self.has_codec)
        source = self.reads_sources
        prompts, edits = ((kind in self.model.supports and not source) for kind in ("prompts", "edits"))
        return {"prompt": prompts, "source": source, "long_text": False, **codec, "edit": self.has_codec and edits}

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `/v1/models`."""
        config = self.model.config
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "jpeg-dlm",
            "title": self.title,
            "tokens": config.data.token_len,
            "latents": config.model.latent_len if config.rate is not None else None,
            "options": {name: getattr(config.sampler, name) for name in self.option_names},
            "can": self.can,
        }


def load_models(
    specs: Sequence[str],
    device: str | None = None,
    backend: Backend | None = None,
    precision: Precision | None = None,
) -> dict[str, Served]:
    """Load the models of `PATH` or `NAME=PATH`; without any, the bundled one."""
    named: dict[str, Path] = {}
    for spec in specs or ["bundled"]:
        name, equals, path = spec.partition("=")
        if not equals or Path(spec).exists():
            name, path = Path(spec).resolve().name, spec
        if not name or name in named:
            raise UsageError(f"'{spec}' needs a name of its own: write NAME={path}.")
        named[name] = Path(path)
    return {name: serve_model(name, load(path, device, backend, precision)) for name, path in named.items()}


def serve_model(name: str, model: Model) -> Served:
    """Load what requests will need: the tokenizer, and the encoder if texts can be encoded or sources are read."""
    model.tokenizer  # noqa: B018 - a missing tokenizer shall stop the start, not a request
    codec, reads_sources = isinstance(model.parts.trained, JpegDlm), model.config.data.source_len > 0
    if codec or (reads_sources and model.parts.trained):
        try:
            model.complete_method()
        except JpegDlmError as error:
            if reads_sources:
                raise
            codec = False
            print(f"{name} will write but not encode texts: {error}", file=sys.stderr)
    return Served(name, model, int(time.time()), codec)
