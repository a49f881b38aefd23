"""The frozen encoder of a run: pretrained first if need be, with feature statistics, and a cache of its features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from jpeg_dlm.config import Config, TrainConfig
from jpeg_dlm.encoders import FrozenEncoder, build_encoder
from jpeg_dlm.encoders.build import FrozenSmallEncoder
from jpeg_dlm.encoders.frozen import measure_statistics, save_statistics
from jpeg_dlm.encoders.small import CONFIG_FILE, read_small_encoder_info, save_small_encoder
from jpeg_dlm.errors import UsageError
from jpeg_dlm.machine.collectives import barrier
from jpeg_dlm.methods.base import Trainable
from jpeg_dlm.methods.encoder_pretraining import EncoderPretraining
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training.bench import Bench, statistics_rows
from jpeg_dlm.training.feature_cache import FeatureCache

TrainStage = Callable[[Config, Path, Bench], Trainable]


def with_encoder(config: Config, run: Path, bench: Bench, train: TrainStage) -> Bench:
    """Add the frozen encoder to `bench`, and the cache of its features if the config asks for it."""
    bench = replace(bench, encoder=prepare_encoder(config, run, bench, train))
    return replace(bench, cache=feature_cache(run, bench)) if config.data.cache_features else bench


def prepare_encoder(config: Config, run: Path, bench: Bench, train: TrainStage) -> FrozenEncoder:
    """Return the frozen encoder with its feature statistics; `train` it first if the preset has its own encoder."""
    folder = run / "encoder"
    e, blocks = config.encoder, bench.blocks
    if e.kind == "small" and not e.name and not (folder / CONFIG_FILE).is_file():
        if config.train.encoder_steps == 0:
            raise UsageError(
                "The preset uses its own encoder: give a trained one with --encoder.name, or set --train.encoder-steps."
            )
        method = train(encoder_config(config), run / "encoder-training", bench)
        assert isinstance(method, EncoderPretraining)
        finish_encoder(method, config, bench, folder)
    if e.kind == "small":
        _check_tokenizer(folder if (folder / CONFIG_FILE).is_file() else Path(e.name), blocks)
    encoder = build_encoder(e, config.data.vocab_size, config.train.seed, folder)
    if e.scale == "per_channel" and not encoder.has_statistics:
        encoder.set_feature_statistics(*measure_statistics(encoder, statistics_batches(blocks)))
        if bench.ranks.is_main:
            save_statistics(folder, encoder)
        barrier()
    return encoder.to(bench.ranks.device)


def _check_tokenizer(folder: Path, blocks: Blocks) -> None:
    """Check that the encoder was trained with the tokenizer of the blocks."""
    known = read_small_encoder_info(folder).tokenizer_fingerprint
    if known and known != blocks.index["tokenizer"]:
        raise UsageError(
            f"The encoder in '{folder}' was trained with another tokenizer than the text: prepare the text with "
            "--data.tokenizer set to that encoder's tokenizer.json, or train another encoder."
        )


def encoder_config(config: Config) -> Config:
    """Return the config of the encoder's pretraining within a run, the same for every method."""
    t = config.train
    train = replace(
        t, steps=t.encoder_steps, lr=t.encoder_lr, schedule="cosine", warmup=0, lr_floor=0.0, compile=False,
        optimizer="adamw", weight_decay=TrainConfig.weight_decay, adam_eps=TrainConfig.adam_eps, init="",
    )  # fmt: skip
    return replace(config, method="encoder", train=train)


def statistics_batches(blocks: Blocks) -> Iterator[tuple[Tensor, Tensor | None]]:
    return map(partial(masked_rows, blocks), statistics_rows(blocks))


def masked_rows(blocks: Blocks, numbers: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Return the tokens of these rows and the mask of real ones."""
    tokens = blocks.rows(list(numbers))
    return tokens, blocks.mask(tokens)


def finish_encoder(method: EncoderPretraining, config: Config, bench: Bench, folder: Path) -> None:
    """Measure the trained encoder's feature statistics and save it in `folder`."""
    if bench.ranks.is_main:
        model, blocks = method.model.cpu(), bench.blocks
        scale = replace(config.encoder, scale="per_channel", kind="small")
        measured = measure_statistics(FrozenSmallEncoder(model, "small", scale), statistics_batches(blocks))
        model.set_feature_statistics(*measured)
        save_small_encoder(folder, model, blocks.tokenizer().fingerprint)
    barrier()


def feature_cache(run: Path, bench: Bench) -> FeatureCache:
    """Compute the features of all training rows once and open them from disk."""
    blocks, encoder, ranks, folder = bench.blocks, bench.encoder, bench.ranks, run / "features"
    assert encoder is not None
    if ranks.is_main:
        with bench.console.progress("Caching encoder features", "rows") as progress:
            FeatureCache.build(
                folder, encoder, partial(masked_rows, blocks), len(blocks), blocks.token_len, progress, blocks.fingerprint,
                device=str(ranks.device),
            )  # fmt: skip
    barrier()
    return FeatureCache(folder, encoder.fingerprint, blocks.fingerprint)
