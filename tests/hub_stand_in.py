"""A stand-in for the package `datasets`, which tests do not install."""

from __future__ import annotations


class HubStandIn:
    """Stands for the package `datasets`: records by configuration and split."""

    def __init__(self, sets):
        self.sets, self.calls = sets, []

    def load_dataset(self, path, name=None, *, split, revision, streaming):
        assert streaming
        self.calls.append((path, name, split, revision))
        if name is None and len(self.sets) > 1:
            raise ValueError("Config name is missing.\nPlease pick one among the available configs.")
        records = self.sets[name or next(iter(self.sets))][split]

        class Stream(list):
            def skip(self, n):
                return Stream(self[n:])

        return Stream(records)
