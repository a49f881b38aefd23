"""Stream Hugging Face data sets: NAME[/CONFIG][@REVISION][:SPLIT[,HELDOUT]]."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jpeg_dlm.errors import DataError, MissingPackageError, UsageError, reason_of
from jpeg_dlm.text.records import RecordReader
from jpeg_dlm.text.text_files import Document, document_of

SPLIT = re.compile(r"([^\[\]]+)(?:\[(\d*):(\d*)\])?")  # NAME or NAME[FIRST:END], which datasets itself does not stream


def split_names(name: str) -> tuple[str, str]:
    """Return the split to train on and the held-out one, "" if none is named."""
    train, _, heldout = name.partition(":")[2].partition(",")
    for split in (train, heldout):
        if split and not SPLIT.fullmatch(split):
            raise UsageError(f"'{split}' is not a split of a data set: write NAME or NAME[FIRST:END], as in train[:1000].")
    return train or "train", heldout


def hub_set(name: str) -> tuple[str, str | None, str | None]:
    """Return the path, configuration and revision of a data set.

    Names of the hub have one or two parts, so a third is the configuration. In a folder, it is the part after the folder whose
    README.md defines configurations.
    """
    path, _, revision = name.partition(":")[0].partition("@")
    path = os.path.expanduser(path)
    folder, _, last = path.rpartition("/")
    card = Path(folder) / "README.md"
    defined = bool(folder) and card.is_file() and "config_name:" in card.read_text("utf-8", "replace")
    if defined or (path.count("/") >= 2 and not Path(path).is_dir()):
        return folder, last or None, revision or None
    return path, None, revision or None


@dataclass(frozen=True)
class HubSplit:
    """A split of a data set, or a range of its records."""

    name: str
    split: str
    reader: RecordReader

    def documents(self, skip: int) -> Iterator[Document]:
        """Stream the documents after the first `skip`; raise `DataError` if the data set cannot be read."""
        try:
            import datasets  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingPackageError("datasets", "data", f"The data set '{self.name}'") from error
        path, config, revision = hub_set(self.name)
        split, first, end = SPLIT.fullmatch(self.split).groups()  # type: ignore[union-attr]  # `split_names` checked it
        start, count = int(first or 0) + skip, max(0, int(end) - int(first or 0) - skip) if end else None
        try:
            stream = datasets.load_dataset(path, config, split=split, revision=revision, streaming=True).skip(start)
            for record in itertools.islice(stream, count):
                # Keep empty records: the number of documents read is the number to skip when resuming.
                yield document_of(record, self.reader)
        except (OSError, ValueError, RuntimeError) as error:
            remedy = "check the name, its split, --data.field and the network"
            if "Config name is missing" in str(error):
                configs = datasets.get_dataset_config_names(path, revision=revision)
                remedy = f"name one of {', '.join(configs)}, as in hf:{path}/{configs[0]}"
            elif "scripts are no longer supported" in str(error):
                remedy = f"name a revision in Parquet, for many sets hf:{path}@refs/convert/parquet"
            raise DataError(f"Cannot read the data set '{self.name}' ({reason_of(error)}): {remedy}.") from error
        self.reader.check()
