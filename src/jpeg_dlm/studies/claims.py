"""What the paper concludes from its studies, as conjectures that ours judge."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, pairwise

from jpeg_dlm.studies.conjectures import Conjecture, better_text
from jpeg_dlm.studies.latent_rates import RATES

BOTH_REGULARIZERS = "SIGReg and variance + covariance"


def _flat(pairs: Iterable[tuple[Conjecture, Conjecture]]) -> tuple[Conjecture, ...]:
    return tuple(chain.from_iterable(pairs))


ABOUT_ABLATIONS = _flat(  # Table 2
    better_text("Base", without, said)
    for without, said in {
        "sep. nets": "One network for both branches improves text",
        "w/o jep": "Joint-embedding prediction improves text",
        "w/o jep + sep. nets": "Both together improve text",
        "w/o feat": "The feature loss improves text",
        "sigma=0.5": "Corruption of sigma = 1 improves text",
        "sigma=1.5": "Corruption of sigma = 1 improves text",
        "ce at t in [0.5,1]": "The token loss on clean latents alone improves text",
    }.items()
)
ABOUT_REGULARIZERS = _flat(  # appendix
    better_text(BOTH_REGULARIZERS, alone, "All regularizers together improve text")
    for alone in ("no regularizer", "SIGReg", "variance + covariance")
)
ABOUT_RATES = _flat(  # Figure 3a
    better_text(f"r = {more:g}", f"r = {less:g}", "Text is better under weaker compression") for more, less in pairwise(RATES)
)
ABOUT_JOINT = _flat(  # Figure 4a
    better_text("JPEG-DLM", other, f"Joint training improves text over {other}") for other in ("COSMOS", "ELF")
)
