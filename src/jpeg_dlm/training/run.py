"""A run from text to trained model: prepare the text, train stage by stage, write metrics, plots and samples.

RUN/config.json  tokenizer.json  metrics.jsonl  metrics.png  diagnosis.png  alarms.jsonl (if any)  samples/  checkpoints/
RUN/tensorboard/  event files, with --train.log tensorboard
RUN/files.jsonl  invocations.jsonl  hashes of the files that the run wrote, and its calls of `train`
RUN/data/        prepared blocks, unless a prepared folder was given
RUN/encoder/     the trained 'small' encoder
RUN/features/    cached features, with --data.cache-features
RUN/STAGE-training/  the run of an earlier stage: 'encoder', or the first stage of a two-stage method
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from jpeg_dlm.config import Config, DataConfig, validate
from jpeg_dlm.config_io import from_dict, read_json_file, to_dict
from jpeg_dlm.errors import UsageError
from jpeg_dlm.folders.checkpoint import latest_checkpoint, newest_step
from jpeg_dlm.folders.model_folder import named_model, read_model
from jpeg_dlm.machine.collectives import all_sum, barrier
from jpeg_dlm.machine.console import Console
from jpeg_dlm.machine.dist import Ranks
from jpeg_dlm.methods.base import Method, Trainable
from jpeg_dlm.methods.encoder_pretraining import EncoderPretraining
from jpeg_dlm.methods.registry import build_method, method_class
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.sampling.speeds import cost_of, with_precision
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.corpora import bring
from jpeg_dlm.text.prepare import prepare
from jpeg_dlm.text.rows import end_rows
from jpeg_dlm.text.tokenizer import TextTokenizer
from jpeg_dlm.training.alarms import Alarms
from jpeg_dlm.training.bench import Bench, Outcome, StageStopped, statistics_rows
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.training.diagnosis import TEXTS, Diagnosis
from jpeg_dlm.training.diagnosis_plot import plot_diagnosis
from jpeg_dlm.training.encoder_stage import finish_encoder, with_encoder
from jpeg_dlm.training.lock import lock_together
from jpeg_dlm.training.loop import Trainer
from jpeg_dlm.training.metrics import MetricsLog
from jpeg_dlm.training.plots import plot_metrics
from jpeg_dlm.training.record import Invocation, write_recorded
from jpeg_dlm.training.signals import StopSignal
from jpeg_dlm.training.telling import training_progress
from jpeg_dlm.training.trackers import Follower, Start, check_tracker
from jpeg_dlm.training.validation import heldout_losses

SAMPLE_TEXTS = 8


def train_run(config: Config, run: Path, ranks: Ranks, console: Console, resume: bool, stop_at: int | None = None) -> Outcome:
    """Do everything that `jpeg-dlm train` does; after step `stop_at`, save and stop."""
    config = validate(config)
    check_tracker(config.train.log)
    echo_s, farewell = 2.0 if ranks.world > 1 else 0.0, partial(last_words, run) if ranks.is_main else None
    with lock_together(run), StopSignal(echo_s, farewell) as stop:
        _check_fresh(run, resume)
        config = with_settled_precision(config, run, ranks, console)
        invocation = Invocation(run, config, ranks.world) if ranks.is_main else None
        if ranks.is_main:  # the config as requested, which --resume reads
            write_recorded(run, "config.json", json.dumps(to_dict(config), indent=1) + "\n")
        try:
            folder = prepared_folder(config, run, ranks, console, stop)
            bench = Bench(Blocks(folder, "train"), Blocks(folder, "heldout"), ranks, console, stop, invocation)
            # The text may have changed on disk unless it was prepared just now.
            if ranks.is_main and (resume or folder != run / "data"):
                bench.blocks.verify()
                bench.heldout.verify()
            config = fit_to_data(config, bench.blocks, ranks.world)
            if method_class(config.method).needs_encoder(config):
                bench = with_encoder(config, run, bench, train_method)
            method = train_method(config, run, bench, stop_at)
        except StageStopped as stopped:
            return stopped.outcome
        if isinstance(method, EncoderPretraining):
            finish_encoder(method, config, bench, run / "encoder")
    return Outcome(config.train.steps, None)


def last_words(run: Path) -> str:
    """Return the message for a run that stops without saving."""
    kept = [f"step {step:,} of {folder.name}" for folder in [run, *run.glob("*-training")] if (step := newest_step(folder))]
    said = f"the checkpoint of {kept[0]} is kept" if kept else "no checkpoint was saved yet"
    return f"Stopped without saving: {said}; continue with --resume."


def _check_fresh(run: Path, resume: bool) -> None:
    if not resume and ((run / "checkpoints").is_dir() or any(run.glob("*-training/checkpoints"))):
        raise UsageError(f"'{run}' already holds a run: continue with --resume, or name another folder with --out.")


def with_settled_precision(config: Config, run: Path, ranks: Ranks, console: Console) -> Config:
    """Settle precision 'auto': as the run began, or as the main process chooses; it is the same on every machine."""
    stored = run / "config.json"
    if config.train.precision == "auto" and stored.is_file():
        begun = from_dict(read_json_file(stored)).train.precision
        config = replace(config, train=replace(config.train, precision=begun))
    asked, device = config.train.precision, ranks.device.type
    config = with_precision(config, device)
    mine = float(ranks.is_main and config.train.precision == "bf16")
    bf16 = all_sum(torch.tensor([mine], device=ranks.device)).item() > 0  # machines may differ; the main process decides
    if asked == "bf16" and device == "cpu" and (cost := cost_of("bf16")):
        console.say(f"{cost} --train.precision auto takes the faster type.")
    return replace(config, train=replace(config.train, precision="bf16" if bf16 else "fp32"))


# ---------------------------------------------------------------- data


def prepared_folder(config: Config, run: Path, ranks: Ranks, console: Console, stop: StopSignal) -> Path:
    """Return the given folder if it is already prepared; else let the main process prepare RUN/data."""
    source = Path(os.path.expanduser(config.data.source))  # Path.expanduser raises an error for unknown users
    if config.data.source and (source / "index.json").is_file():
        return source
    if ranks.is_main:
        run.mkdir(parents=True, exist_ok=True)
        bring(config.data.source, run / "data", console)
        with console.progress("Preparing text", "bytes") as progress:

            def check() -> None:
                if stop.requested and ranks.world == 1:  # other processes would wait at the barrier
                    raise StageStopped(Outcome(0, stop.requested))

            done = prepare(config.data, run / "data", progress, check=check)
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
    train = config.train
    if train.steps == 0:
        rows = train.batch * train.accumulation * world
        train = replace(train, steps=math.ceil(train.epochs * len(blocks) / rows))
    # The config of the run records the data settings of the prepared folder.
    data = from_dict(blocks.index["data"], DataConfig)
    data = replace(data, vocab_size=blocks.vocab_size, cache_features=config.data.cache_features)
    return validate(replace(config, data=data, train=train))


# ---------------------------------------------------------------- training proper


def train_method(config: Config, run: Path, bench: Bench, stop_at: int | None = None) -> Trainable:
    """Train the method of a config, from its last checkpoint if there is one, and return it with averaged weights."""
    run.mkdir(parents=True, exist_ok=True)
    ranks, console, tokenizer = bench.ranks, bench.console, bench.blocks.tokenizer()
    context = config.model.context_blocks if method_class(config.method).uses_context else 0
    stream = BatchStream(bench.blocks, config.train, ranks.device, ranks.rank, ranks.world, bench.cache, context)
    checkpoint = latest_checkpoint(run, console.warn)
    method = build_method(config, bench.encoder).to(ranks.device) if checkpoint else new_method(config, run, bench, stream)
    trainer = Trainer(config, method, stream, run, ranks, provenance(bench), stop_at=stop_at)
    if checkpoint:
        trainer.restore(checkpoint)
        if sentence := checkpoint.foreign():
            console.warn(sentence)
        console.say(f"Resuming {config.method} from step {trainer.step:,} of {config.train.steps:,}.")
    if bench.invocation:
        bench.invocation.begin(config.method, trainer.step)
        write_recorded(run, "tokenizer.json", tokenizer.to_json())
    resume = trainer.step if checkpoint else None
    follower = Follower(Start(run, config, resume), console.warn) if ranks.is_main else None  # before the log drops lines
    log = MetricsLog(run / "metrics.jsonl", resume) if ranks.is_main else None
    alarms = Alarms(run, config.train, console.warn, resume) if ranks.is_main else None
    with training_progress(console, config, trainer.step, stream.rows_per_step) as show:

        def tell(step: int, values: dict[str, float]) -> None:
            show(step, values)
            if alarms and follower:
                alarms.watch(step, values)
                follower.log(step, values)

        stopped = trainer.fit(log, bench.stop, tell, evaluation(trainer, bench.heldout, tokenizer))
    if log and follower:
        log.close()
        follower.close()
        plot_if_measured(run)
    if trainer.step < config.train.steps:
        by = f"--stop-at {stop_at}" if stop_at is not None and not bench.stop.requested else stopped
        raise StageStopped(Outcome(trainer.step, by, config.method))
    return trainer.finished_method()


def new_method(config: Config, run: Path, bench: Bench, stream: BatchStream) -> Trainable:
    """Build the method with the weights of `train.init`, or with fresh ones after its first stage, if it has one."""
    if config.train.init:
        return fine_tuned(config, bench)
    before, trained = method_class(config.method).first_stage(config), method_class(config.method).trained_stage(config)
    stage = train_method(before, run / f"{before.method}-training", bench) if before else None
    stage = read_model(trained).method if trained else stage
    method = build_method(config, bench.encoder).to(bench.ranks.device)
    if stage:
        method.start_from(stage, map(stream.batch, statistics_rows(bench.blocks)))
    return method


def fine_tuned(config: Config, bench: Bench) -> Trainable:
    """Build the method with the weights of a trained model of the same method."""
    start = named_model(config.train.init)
    if start.config.method != config.method:
        raise UsageError(
            f"'{config.train.init}' holds a model of {start.config.method}: train.init needs one of {config.method}."
        )
    method = build_method(config, bench.encoder)
    method.import_state(start.method.export_state(), config.train.init)
    return method.to(bench.ranks.device)


def provenance(bench: Bench) -> dict[str, str]:
    """Return fingerprints of everything that must be unchanged when a checkpoint is resumed."""
    known = {"data": bench.blocks.fingerprint, "tokenizer": bench.blocks.index["tokenizer"]}
    return known | ({"encoder": bench.encoder.fingerprint} if bench.encoder else {})


def evaluation(trainer: Trainer, heldout: Blocks, tokenizer: TextTokenizer) -> Callable[[int], dict[str, float]]:
    """Return the evaluation run every `eval_every` steps with averaged weights: held-out losses, samples and plots."""
    method, config, ranks = trainer.method, trainer.config, trainer.ranks
    diagnosis = Diagnosis(trainer.stream, heldout, tokenizer) if ranks.is_main and config.train.diagnose else None

    def evaluate(step: int) -> dict[str, float]:
        rows_BL = torch.empty(0)
        with trainer.averaged(), trainer.autocast():
            values = heldout_losses(method, heldout, ranks, context_blocks=trainer.stream.context_blocks)
            if isinstance(method, Method):
                rows_BL = sample_rows(method, config, tokenizer, ranks, TEXTS if config.train.diagnose else SAMPLE_TEXTS)
                values |= diagnosis(method, rows_BL) if diagnosis else {}

        def show() -> None:
            if len(rows_BL):
                write_samples(rows_BL[:SAMPLE_TEXTS], tokenizer, trainer.run, step)
            plot_if_measured(trainer.run)

        if ranks.is_main:
            trainer.background.start(show)
        return values

    return evaluate


def plot_if_measured(run: Path) -> None:
    """Draw metrics and diagnosis again, unless the run stopped before its first line."""
    path = run / "metrics.jsonl"
    if path.is_file() and path.stat().st_size:
        plot_metrics(run)
        plot_diagnosis(run)


def sample_rows(method: Method, config: Config, tokenizer: TextTokenizer, ranks: Ranks, n: int) -> torch.Tensor:
    """Return token ids of the first n samples of seed 0, each drawn by one process; if rows end, padded after the end token."""
    was_training = method.training
    method.eval()
    rows_BL = torch.zeros(n, config.data.token_len, dtype=torch.long, device=ranks.device)
    if own := range(n)[ranks.rank :: ranks.world]:
        rows_BL[ranks.rank :: ranks.world] = method.sample(config.sampler, RowNoise(0, own, 0, ranks.device))
    rows_BL = all_sum(rows_BL)
    method.train(was_training)
    return end_rows(rows_BL, tokenizer.eos_id, tokenizer.pad_id) if config.data.rows_end else rows_BL


def write_samples(rows_BL: torch.Tensor, tokenizer: TextTokenizer, run: Path, step: int) -> None:
    """Write the first samples at this step, unselected, to a text file."""
    texts = [tokenizer.decode(row) for row in rows_BL.tolist()]
    (run / "samples").mkdir(exist_ok=True)
    content = "\n".join(f"[{i}] {text}" for i, text in enumerate(texts)) + "\n"
    write_recorded(run, f"samples/step-{step:08d}.txt", content)
