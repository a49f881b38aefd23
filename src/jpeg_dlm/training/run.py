"""A run from text to trained model: prepare the text, train stage by stage, write metrics, plots and samples.

RUN/config.json  tokenizer.json  metrics.jsonl  metrics.png  samples/  checkpoints/
RUN/invocations.jsonl  the calls of `train`
RUN/data/        prepared blocks, unless a prepared folder was given
RUN/encoder/     the trained 'small' encoder
RUN/features/    cached features, with --data.cache-features
RUN/STAGE-training/  the run of a stage before: 'encoder', or the codec of COSMOS
"""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from jpeg_dlm.checkpoints.checkpoint import latest_checkpoint, newest_step
from jpeg_dlm.checkpoints.model_folder import named_model
from jpeg_dlm.config import Config, DataConfig, validate
from jpeg_dlm.encoders import FrozenEncoder
from jpeg_dlm.encoders.small import CONFIG_FILE
from jpeg_dlm.methods.base import Method, Trainable
from jpeg_dlm.methods.encoder_pretraining import EncoderPretraining
from jpeg_dlm.methods.latent_geometry import latent_measures
from jpeg_dlm.methods.registry import build_method, method_class
from jpeg_dlm.methods.sources import sample
from jpeg_dlm.options import from_dict, read_json_file, to_dict
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.packing import end_rows
from jpeg_dlm.text.prepare import prepare
from jpeg_dlm.text.tokenizer import TextTokenizer
from jpeg_dlm.training.data import BatchStream, batch_of
from jpeg_dlm.training.features import FeatureCache, feature_cache, frozen_encoder, save_encoder, statistics_rows
from jpeg_dlm.training.lock import lock_together
from jpeg_dlm.training.logs import check_tracker, open_logs
from jpeg_dlm.training.metrics import HELDOUT, log_invocation
from jpeg_dlm.training.signals import StopSignal
from jpeg_dlm.training.trainer import Launched, Trainer
from jpeg_dlm.util.console import Console
from jpeg_dlm.util.distributed import Ranks, all_mean, all_sum, barrier, on_main, with_precision
from jpeg_dlm.util.errors import UsageError
from jpeg_dlm.util.files import write_atomic
from jpeg_dlm.util.rng import RowNoise

SAMPLE_TEXTS = 8
MANY_PASSES = 50  # over the training rows (assumed; the paper has 5 and 20)
HELDOUT_ROWS, HELDOUT_BATCH = 512, 128  # rows of an evaluation, and rows at a time over all processes (assumed)


@dataclass(frozen=True)
class Outcome:
    """The last step of a run, what stopped it (None if it finished), and the stage that was training then."""

    step: int
    stopped_by: str | None
    stage: str = ""


class StageStopped(Exception):
    """A stage was asked to stop, so later stages must not start; the argument is the outcome."""


@dataclass(frozen=True)
class RunContext:
    """What all stages of a run share."""

    run: Path
    blocks: Blocks
    heldout: Blocks
    ranks: Ranks
    console: Console
    stop: StopSignal
    encoder: FrozenEncoder | None = None
    cache: FeatureCache | None = None

    @property
    def provenance(self) -> dict[str, str]:
        """Fingerprints of everything that must be unchanged when a checkpoint is resumed."""
        fingerprints = {"data": self.blocks.fingerprint, "tokenizer": self.blocks.index["tokenizer"]}
        return fingerprints | ({"encoder": self.encoder.fingerprint} if self.encoder else {})


def train_run(config: Config, run: Path, ranks: Ranks, console: Console, resume: bool, stop_at: int | None = None) -> Outcome:
    """Do everything that `jpeg-dlm train` does; after step `stop_at`, save and stop."""
    config = validate(config)
    check_tracker(config.train.log)
    farewell = "Stopped without saving: continue with --resume." if ranks.is_main else ""
    with lock_together(run), StopSignal(2.0 if ranks.world > 1 else 0.0, farewell) as stop:
        if not resume and ((run / "checkpoints").is_dir() or any(run.glob("*-training/checkpoints"))):
            raise UsageError(f"'{run}' already holds a run: continue with --resume, or name another folder with --out.")
        config = with_settled_precision(config, run, ranks)
        if ranks.is_main:  # the config as requested, which --resume reads
            write_atomic(run / "config.json", json.dumps(to_dict(config), indent=1) + "\n")
        try:
            folder = prepared_folder(config, run, ranks, console, stop)
            context = RunContext(run, Blocks(folder, "train"), Blocks(folder, "heldout"), ranks, console, stop)
            # The text may have changed on disk unless it was prepared just now.
            if ranks.is_main and (resume or folder != run / "data"):
                context.blocks.verify()
                context.heldout.verify()
            train_stages(fit_to_data(config, context.blocks, ranks.world), context, stop_at)
        except StageStopped as stopped:
            return stopped.args[0]
    return Outcome(config.train.steps, None)


def with_settled_precision(config: Config, run: Path, ranks: Ranks) -> Config:
    """Settle precision 'auto': as the run began, or as the main process chooses; it is the same on every machine."""
    stored = run / "config.json"
    if config.train.precision == "auto" and stored.is_file():
        begun = from_dict(read_json_file(stored)).train.precision
        config = replace(config, train=replace(config.train, precision=begun))
    return on_main(lambda: with_precision(config, ranks.device.type))


# ---------------------------------------------------------------- data


def prepared_folder(config: Config, run: Path, ranks: Ranks, console: Console, stop: StopSignal) -> Path:
    """Return the given folder if it is already prepared; else let the main process prepare RUN/data."""
    source = Path(os.path.expanduser(config.data.source))  # Path.expanduser raises an error for unknown users
    if config.data.source and (source / "index.json").is_file():
        return source
    if ranks.is_main:

        def check() -> None:
            if stop.requested and ranks.world == 1:  # other processes would wait at the barrier
                raise StageStopped(Outcome(0, stop.requested))

        done = prepare(config.data, run / "data", console, check=check)
        if done.note:
            console.say(done.note)
    barrier()
    return run / "data"


def fit_to_data(config: Config, blocks: Blocks, world: int) -> Config:
    """Return the config with the sizes of the data, and with epochs converted to steps."""
    if config.data.token_len != blocks.token_len:
        raise UsageError(
            f"The prepared blocks have {blocks.token_len} tokens but data.token_len is {config.data.token_len}: "
            f"use --data.token-len {blocks.token_len} or prepare the text again."
        )
    if blocks.source_len and method_class(config.method).sources == "none":
        raise UsageError(f"{method_class(config.method).title} reads no sources: choose another method for pairs.")
    if config.data.source_len != blocks.source_len:
        raise UsageError(
            f"The prepared rows have sources of {blocks.source_len} tokens: use --data.source-len {blocks.source_len}."
        )
    train = config.train
    if train.steps == 0:
        rows = train.batch * train.accumulation * world
        train = replace(train, steps=math.ceil(train.epochs * len(blocks) / rows))
    # The config of the run records the data settings of the prepared folder.
    data = from_dict(blocks.index["data"], DataConfig)
    data = replace(data, vocab_size=blocks.vocab_size, cache_features=config.data.cache_features)
    return validate(replace(config, data=data, train=train))


# ---------------------------------------------------------------- stages


def train_stages(config: Config, context: RunContext, stop_at: int | None) -> None:
    """Train what the method needs before, and then the method; finished stages are not trained again."""
    run, encoder_folder = context.run, context.run / "encoder"
    previous, is_first = None, True
    before = [] if newest_step(run) is not None else method_class(config.method).stages(config)
    for stage in [*before, config]:
        if stage.method == "encoder" and stage is not config and (encoder_folder / CONFIG_FILE).is_file():
            continue
        if stage.train.steps == 0:
            raise UsageError(
                "The preset uses its own encoder: give a trained one with --encoder.name, or set --train.encoder-steps."
            )
        if method_class(stage.method).uses_encoder and context.encoder is None:
            encoder = frozen_encoder(config, encoder_folder, context.blocks, context.ranks)
            context = replace(context, encoder=encoder)
            if config.data.cache_features:
                cache = feature_cache(run / "features", encoder, context.blocks, context.ranks, context.console)
                context = replace(context, cache=cache)
        folder = run if stage is config else run / f"{stage.method}-training"
        if context.ranks.is_main and is_first:
            log_invocation(run, stage.method, newest_step(folder) or 0, context.ranks.world)
        is_first = False
        method = train_stage(stage, folder, context, previous, stop_at if stage is config else None)
        if isinstance(method, EncoderPretraining):
            save_encoder(method, config, encoder_folder, context.blocks, context.ranks)
        else:
            previous = method


def train_stage(
    config: Config, folder: Path, context: RunContext, previous: Trainable | None = None, stop_at: int | None = None
) -> Trainable:
    """Train the method of a config, from its last checkpoint if there is one, and return it with averaged weights."""
    train, ranks, console = config.train, context.ranks, context.console
    folder.mkdir(parents=True, exist_ok=True)
    context_blocks = config.model.context_blocks if method_class(config.method).uses_context else 0
    joined = method_class(config.method).sources == "before"
    stream = BatchStream(context.blocks, train, ranks.device, ranks.rank, ranks.world, context.cache, context_blocks, joined)
    checkpoint = latest_checkpoint(folder, console.warn)
    method = build_method(config, context.encoder).to(ranks.device)
    if not checkpoint and (start := named_model(train.init).method if train.init else previous):
        method.eval()  # dropout would draw from the global generator, whose state depends on what this process did before
        start.eval()
        method.start_from(start, map(stream.batch, statistics_rows(stream.blocks)))
    trainer = Trainer(config, method, stream, folder, ranks, context.provenance)
    if checkpoint:
        trainer.restore(checkpoint)
        if warning := checkpoint.changed_environment():
            console.warn(warning)
        console.say(f"Resuming {config.method} from step {trainer.step:,} of {train.steps:,}.")
    passes = train.steps * stream.rows_per_step / len(stream.blocks)
    by_heart = "; it will learn them by heart: more text or fewer --train.steps helps" if passes > MANY_PASSES else ""
    console.say(
        f"Training {config.method}: {train.steps:,} steps of {stream.rows_per_step:,} rows from step {trainer.step:,}, "
        f"{passes:.3g} passes over {len(stream.blocks):,} rows{by_heart}."
    )
    if ranks.is_main:
        context.blocks.tokenizer().save(folder / "tokenizer.json")
    stopped_by = train_loop(trainer, context, trainer.step if checkpoint else None, stop_at)
    if ranks.is_main:
        plot_metrics(folder)
    if trainer.step < train.steps:
        raise StageStopped(Outcome(trainer.step, stopped_by, config.method))
    return trainer.finished_method()


def plot_metrics(run: Path) -> None:
    """Draw metrics.png; without the package matplotlib, metrics.jsonl alone has the numbers."""
    if find_spec("matplotlib"):
        from jpeg_dlm.training import plots

        plots.plot_metrics(run)


def train_loop(trainer: Trainer, context: RunContext, resume: int | None, stop_at: int | None) -> str | None:
    """Train to the end or until asked to stop, and save; return the name of what stopped it."""
    train, stop, stream = trainer.config.train, context.stop, trainer.stream
    opened = open_logs(trainer.run, trainer.config, resume, context.console)
    with opened if context.ranks.is_main else nullcontext() as logs, trainer.background:
        began, rows, saved = time.monotonic(), 0, trainer.step
        running: Launched | None = None  # read while the device works on the next step
        last = train.steps if stop_at is None else min(stop_at, train.steps)
        while trainer.step < last:
            if trainer.stop_seen if context.ranks.world > 1 else stop.requested:  # all processes learn it from the same step
                break
            launched = trainer.launch_step(stop.requested is not None)
            rows += stream.rows_per_step
            if running:
                trainer.finish_step(running)
            running, step = launched, trainer.step
            every = (train.log_every, train.eval_every, train.save_every)
            log, evaluate, save = (n > 0 and (step % n == 0 or step == train.steps) for n in every)
            if not (log or evaluate or save or step == last):
                continue
            values, running = trainer.finish_step(launched), None
            if log and logs:
                logs.report(step, values | {"rows_per_s": rows / (time.monotonic() - began)})
            if evaluate:  # on every process, because the losses of some methods use global statistics
                heldout = evaluation(trainer, context)
                if logs:
                    logs.report(step, heldout)
            if save:
                trainer.save(logs and logs.metrics)
                saved = step
            began, rows = time.monotonic(), 0  # rows_per_s is the speed of the steps alone
        if running:
            trainer.finish_step(running)
        if saved != trainer.step:
            trainer.save(logs and logs.metrics)
        trainer.finish_saving()
    trainer.wrapped = trainer.method  # DistributedDataParallel would keep the process group's threads alive
    if stop.requested or trainer.step == train.steps:
        return stop.requested
    return f"--stop-at {stop_at}" if trainer.step >= last else "SIGTERM"  # the signal reached another process


# ---------------------------------------------------------------- evaluation


def evaluation(trainer: Trainer, context: RunContext) -> dict[str, float]:
    """Return held-out losses with averaged weights; the main process also writes samples and plots."""
    method, config, ranks, tokenizer = trainer.method, trainer.config, context.ranks, context.blocks.tokenizer()
    rows_BL: torch.Tensor | None = None
    method.eval()
    with trainer.averaged(), trainer.autocast():
        values = heldout_losses(method, context.heldout, ranks, trainer.stream.context_blocks)
        if isinstance(method, Method):
            rows_BL = sample_rows(method, config, tokenizer, ranks, SAMPLE_TEXTS, context.heldout)
    if ranks.is_main:
        if rows_BL is not None:
            trainer.background.start(partial(write_samples, rows_BL, tokenizer, trainer.run, trainer.step))
        trainer.background.start(partial(plot_metrics, trainer.run))
    return values


@torch.no_grad()
def heldout_losses(method: Trainable, blocks: Blocks, ranks: Ranks, context_blocks: int = 0) -> dict[str, float]:
    """Return mean losses over the first held-out rows with fixed noise, and token accuracy if the method reconstructs text.

    For methods with latents, also measure their geometry and their decoding under noise, on the first batch alone. Every
    process takes an equal share of each batch, so up to `world - 1` rows at the end are skipped.
    """
    totals: dict[str, float] = {}
    device, world = ranks.device, ranks.world
    n, batch = min(HELDOUT_ROWS, len(blocks)) // world * world, max(1, HELDOUT_BATCH // world) * world
    for start in range(0, n, batch):
        rows = range(start, min(start + batch, n))[ranks.rank :: world]
        b = batch_of(blocks, rows, device, context_blocks, joined=method.sources == "before")
        noise = RowNoise(0, rows, 0, device, n)
        values = {k: float(v) for k, v in method.losses(b, noise).items()}
        accuracy = method.reconstruction(b)
        if accuracy is not None:
            values["accuracy"] = float(accuracy)
        for name, value in values.items():
            totals[HELDOUT + name] = totals.get(HELDOUT + name, 0.0) + value * len(rows) * world / n
        measured = start == 0 and len(rows) * world > 1 and method.learns_latents  # one text has no variance
        if measured and (model := method.latent_model()):
            totals |= latent_measures(model, b, noise)
    if world == 1 or not totals:
        return totals
    means = all_mean(torch.tensor(list(totals.values()), dtype=torch.float64, device=device))
    return dict(zip(totals, means.tolist(), strict=True))


def sample_rows(
    method: Method, config: Config, tokenizer: TextTokenizer, ranks: Ranks, n: int, heldout: Blocks | None = None
) -> torch.Tensor:
    """Return token ids of the first n samples of seed 0, each drawn by one process; if rows end, padded after the end token.

    The samples of a model of pairs are targets of the sources of held-out rows, evenly spread.
    """
    rows_BL = torch.zeros(n, config.data.token_len, dtype=torch.long, device=ranks.device)
    if own := range(n)[ranks.rank :: ranks.world]:
        rows = [i * len(heldout) // n for i in own] if heldout else []
        source = batch_of(heldout, rows, ranks.device).source if heldout else None
        rows_BL[ranks.rank :: ranks.world] = sample(method, config.sampler, RowNoise(0, own, 0, ranks.device), source=source)
    rows_BL = all_sum(rows_BL)
    return end_rows(rows_BL, tokenizer.eos_id, tokenizer.pad_id) if config.data.rows_end else rows_BL


def write_samples(rows_BL: torch.Tensor, tokenizer: TextTokenizer, run: Path, step: int) -> None:
    """Write the first samples at this step, unselected, to a text file."""
    texts = [tokenizer.decode(row) for row in rows_BL.tolist()]
    (run / "samples").mkdir(exist_ok=True)
    content = "\n".join(f"[{i}] {text}" for i, text in enumerate(texts)) + "\n"
    write_atomic(run / "samples" / f"step-{step:08d}.txt", content)
