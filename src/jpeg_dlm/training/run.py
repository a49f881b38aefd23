"""A run from text to trained model: prepare, pretrain the encoder if needed, train, and write what a person wants to see.

RUN/config.json  tokenizer.json  metrics.jsonl  metrics.png  samples/  checkpoints/
RUN/data/        prepared blocks, unless a prepared folder was named
RUN/encoder/     the trained 'small' encoder; RUN/encoder-training/ is its own run
RUN/features/    cached features, if asked for
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from jpeg_dlm.collectives import barrier
from jpeg_dlm.config import Config, DataConfig, from_dict, to_dict, validate
from jpeg_dlm.encoders import FrozenEncoder, build_encoder
from jpeg_dlm.encoders.base import measure_statistics, save_statistics
from jpeg_dlm.encoders.build import FrozenSmallEncoder
from jpeg_dlm.encoders.small import CONFIG_FILE, read_small_encoder_info, save_small_encoder
from jpeg_dlm.errors import UsageError
from jpeg_dlm.feature_cache import FeatureCache
from jpeg_dlm.files import write_atomic
from jpeg_dlm.methods.base import Method
from jpeg_dlm.methods.encoder_pretraining import EncoderPretraining
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.prepare import prepare
from jpeg_dlm.text.tokenizer import TextTokenizer
from jpeg_dlm.training.checkpoint import latest_checkpoint
from jpeg_dlm.training.console import Console
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.training.dist import Ranks
from jpeg_dlm.training.heldout import heldout_losses
from jpeg_dlm.training.lock import run_lock
from jpeg_dlm.training.loop import Trainer
from jpeg_dlm.training.metrics import MetricsLog
from jpeg_dlm.training.plots import plot_metrics
from jpeg_dlm.training.signals import StopSignal

STATISTICS_ROWS = 4096  # rows over which feature statistics are measured (assumed: plenty for a mean per channel)
SAMPLE_TEXTS = 8


@dataclass(frozen=True)
class Outcome:
    """How a run ended: at which step, and by which signal if it did not finish."""

    step: int
    stopped_by: str | None


def train_run(config: Config, run: Path, ranks: Ranks, console: Console, resume: bool) -> Outcome:
    """Everything `jpeg-dlm train` does."""
    config = validate(config)
    _check_fresh(run, resume)
    with (
        run_lock(run) if ranks.is_main else contextlib.nullcontext(),
        StopSignal(echo_s=2.0 if ranks.world > 1 else 0.0) as stop,
    ):
        if ranks.is_main:  # as it was asked for: what --resume starts from
            write_atomic(run / "config.json", json.dumps(to_dict(config), indent=1) + "\n")
        folder = prepared_folder(config, run, ranks, console)
        blocks, heldout = Blocks(folder, "train"), Blocks(folder, "heldout")
        config = fit_to_data(config, blocks, ranks.world)
        encoder = None
        if config.method != "encoder":
            encoder = prepare_encoder(config, run, blocks, heldout, ranks, console, stop)
            if encoder is None:
                return Outcome(0, stop.requested)
        outcome = _train(config, run, blocks, heldout, encoder, ranks, console, stop)
    return outcome


def _check_fresh(run: Path, resume: bool) -> None:
    if not resume and any((run / part / "checkpoints").is_dir() for part in ("", "encoder-training")):
        raise UsageError(f"'{run}' already holds a run: go on with --resume, or name another folder with --out.")


# ---------------------------------------------------------------- data


def prepared_folder(config: Config, run: Path, ranks: Ranks, console: Console) -> Path:
    """The named folder if it is prepared already, else RUN/data, prepared now by the main process."""
    source = Path(config.data.source).expanduser()
    if config.data.source and (source / "index.json").is_file():
        return source
    if ranks.is_main:
        run.mkdir(parents=True, exist_ok=True)
        with console.progress("Preparing text", "bytes") as progress:
            prepare(config.data, run / "data", progress)
    barrier()
    return run / "data"


def fit_to_data(config: Config, blocks: Blocks, world: int) -> Config:
    """The config with the sizes the data has, and with steps counted out of epochs."""
    if config.data.token_len != blocks.token_len:
        raise UsageError(
            f"The prepared blocks have {blocks.token_len} tokens but data.token_len is {config.data.token_len}: "
            f"use --data.token-len {blocks.token_len} or prepare the text again."
        )
    train = config.train
    if train.steps == 0:
        rows = train.batch * train.accumulation * world
        train = replace(train, steps=math.ceil(train.epochs * len(blocks) / rows))
    # A prepared folder knows what it was made from; the config of the run says the same.
    data = from_dict(blocks.index["data"], DataConfig)
    data = replace(data, vocab_size=blocks.vocab_size, cache_features=config.data.cache_features)
    return validate(replace(config, data=data, train=train))


# ---------------------------------------------------------------- the frozen encoder


def prepare_encoder(
    config: Config, run: Path, blocks: Blocks, heldout: Blocks, ranks: Ranks, console: Console, stop: StopSignal
) -> FrozenEncoder | None:
    """The frozen encoder with its statistics, pretrained first when the preset says so; None if stopped on the way."""
    folder = run / "encoder"
    e = config.encoder
    if e.kind == "small" and not e.name and not (folder / CONFIG_FILE).is_file():
        if config.train.encoder_steps == 0:
            raise UsageError(
                "The preset uses its own encoder: give a trained one with --encoder.name, or set --train.encoder-steps."
            )
        pretraining = encoder_config(config)
        outcome = _train(pretraining, run / "encoder-training", blocks, heldout, None, ranks, console, stop)
        if outcome.stopped_by:
            return None
    if e.kind == "small":
        _check_tokenizer(folder if (folder / CONFIG_FILE).is_file() else Path(e.name), blocks)
    encoder = build_encoder(e, config.data.vocab_size, config.train.seed, folder)
    if e.scale == "per_channel" and not encoder.has_statistics:
        encoder.set_feature_statistics(*measure_statistics(encoder, statistics_batches(blocks)))
        if ranks.is_main:
            save_statistics(folder, encoder)
        barrier()
    return encoder.to(ranks.device)


def _check_tokenizer(folder: Path, blocks: Blocks) -> None:
    """An encoder reads token ids: it must have learned them from the tokenizer that made the blocks."""
    known = read_small_encoder_info(folder).tokenizer_fingerprint
    if known and known != blocks.index["tokenizer"]:
        raise UsageError(
            f"The encoder in '{folder}' was trained with another tokenizer than the text: prepare the text with "
            "--data.tokenizer set to that encoder's tokenizer.json, or train another encoder."
        )


def encoder_config(config: Config) -> Config:
    """The config of the encoder's own pretraining within a larger run."""
    train = replace(
        config.train, steps=config.train.encoder_steps, lr=config.train.encoder_lr, schedule="cosine", warmup=0, compile=False
    )
    return replace(config, method="encoder", train=train)


def statistics_batches(blocks: Blocks) -> Any:
    rows = range(min(STATISTICS_ROWS, len(blocks)))
    for start in range(0, len(rows), 256):
        tokens = blocks.rows(list(rows[start : start + 256]))
        yield tokens, blocks.mask(tokens)


def finish_encoder(method: EncoderPretraining, config: Config, blocks: Blocks, tokenizer: TextTokenizer, folder: Path) -> None:
    """Measure the trained encoder's feature statistics and store it where runs look for it."""
    model = method.model.cpu()
    scale = replace(config.encoder, scale="per_channel", kind="small")
    model.set_feature_statistics(*measure_statistics(FrozenSmallEncoder(model, "small", scale), statistics_batches(blocks)))
    save_small_encoder(folder, model, tokenizer.fingerprint)


def feature_cache(
    config: Config, run: Path, blocks: Blocks, encoder: FrozenEncoder, ranks: Ranks, console: Console
) -> FeatureCache:
    """The features of every training row on disk, computed once."""

    def rows(numbers: range) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens = blocks.rows(list(numbers))
        return tokens, blocks.mask(tokens)

    folder = run / "features"
    if ranks.is_main:
        with console.progress("Caching encoder features", "rows") as progress:
            FeatureCache.build(
                folder, encoder, rows, len(blocks), blocks.token_len, progress, blocks.fingerprint, device=str(ranks.device)
            )
    barrier()
    return FeatureCache(folder, encoder.fingerprint, blocks.fingerprint)


# ---------------------------------------------------------------- training proper


def _train(
    config: Config, run: Path, blocks: Blocks, heldout: Blocks, encoder: FrozenEncoder | None,
    ranks: Ranks, console: Console, stop: StopSignal,
) -> Outcome:  # fmt: skip
    run.mkdir(parents=True, exist_ok=True)
    cache = feature_cache(config, run, blocks, encoder, ranks, console) if encoder and config.data.cache_features else None
    method = build_method(config, encoder).to(ranks.device)
    stream = BatchStream(blocks, config.train, ranks.device, ranks.rank, ranks.world, cache)
    provenance = {"data": blocks.fingerprint, "tokenizer": blocks.index["tokenizer"]}
    if encoder:
        provenance["encoder"] = encoder.fingerprint
    trainer = Trainer(config, method, stream, run, ranks, provenance)
    checkpoint = latest_checkpoint(run, console.warn)
    if checkpoint:
        trainer.restore(checkpoint)
        console.say(f"Resuming {config.method} from step {trainer.step:,} of {config.train.steps:,}.")
    tokenizer = blocks.tokenizer()
    if ranks.is_main:
        tokenizer.save(run / "tokenizer.json")
    log = MetricsLog(run / "metrics.jsonl", trainer.step if checkpoint else None) if ranks.is_main else None
    with console.training(config, trainer.step, stream.rows_per_step) as tell:
        stopped = trainer.fit(log, stop, tell, evaluation(trainer, heldout, tokenizer))
    if ranks.is_main and log:
        log.close()
        plot_metrics(run)
    if isinstance(method, EncoderPretraining) and not stopped:
        if ranks.is_main:
            trainer.ema.swap()
            finish_encoder(method, config, blocks, tokenizer, _encoder_home(run))
        barrier()
    return Outcome(trainer.step, stopped if trainer.step < config.train.steps else None)


def _encoder_home(run: Path) -> Path:
    """RUN/encoder, both for a run of the encoder alone and for pretraining within a larger run."""
    return run.parent / "encoder" if run.name == "encoder-training" else run / "encoder"


def evaluation(trainer: Trainer, heldout: Blocks, tokenizer: TextTokenizer) -> Callable[[int], dict[str, float]]:
    """What happens every `eval_every` steps, with the averaged weights: held-out losses, sample texts, a new plot."""

    def evaluate(step: int) -> dict[str, float]:
        trainer.ema.swap()
        try:
            with trainer.autocast():
                found = heldout_losses(trainer.method, heldout, trainer.ranks)
                if trainer.ranks.is_main and trainer.config.method != "encoder":
                    write_samples(trainer.method, trainer.config, tokenizer, trainer.run, step, trainer.ranks.device)
        finally:
            trainer.ema.swap()
        if trainer.ranks.is_main and (trainer.run / "metrics.jsonl").is_file():
            plot_metrics(trainer.run)
        return found

    return evaluate


def write_samples(
    method: Method, config: Config, tokenizer: TextTokenizer, run: Path, step: int, device: torch.device, n: int = SAMPLE_TEXTS
) -> None:
    """The first n samples of seed 0 at this step, as a text file: not chosen, only counted."""
    was_training = method.training
    method.eval()
    rows = method.sample(n, config.sampler, RowNoise(0, range(n), 0, device))
    method.train(was_training)
    texts = [tokenizer.decode(row) for row in rows.tolist()]
    folder = run / "samples"
    folder.mkdir(exist_ok=True)
    write_atomic(folder / f"step-{step:08d}.txt", "\n".join(f"[{i}] {text}" for i, text in enumerate(texts)) + "\n")
