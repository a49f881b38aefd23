"""Notes under the tables of a study."""

from jpeg_dlm.studies.tables import _notes


def test_an_encoder_that_was_trained_before_is_named():
    """Only for systems that read it, and not if its time is in a column."""
    own = {"budget": "x", "seed": 1, "tokens": 1, "degenerate": [], "encoder_seconds": None, "options": {"encoder.name": "t5"}}
    records = [own | {"label": name, "method": name} for name in ("jpeg-dlm", "elf", "ar")]
    result = {"left_out": [], "errors": {}, "paper": {}, "records": records}
    (note,) = _notes(result)
    assert "'t5' of jpeg-dlm, elf was" in note
    assert _notes(result | {"records": [record | {"encoder_seconds": 30.0} for record in records]}) == []
