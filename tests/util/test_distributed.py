"""Ranks and collectives: one process here, two real gloo processes in the slow tests."""

import itertools
import pickle
from pathlib import Path

import pytest
import torch
from small_runs import launch

from jpeg_dlm.studies.training_cache import StudyStopped
from jpeg_dlm.training.lock import Locked
from jpeg_dlm.util import distributed
from jpeg_dlm.util.distributed import training_precision
from jpeg_dlm.util.errors import MissingPackageError, UsageError


def test_wrong_environments_are_refused():
    wrong = [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "two"}, {"RANK": "2", "WORLD_SIZE": "2"}]
    for device, env in [*(("cpu", env) for env in wrong), ("toaster", {}), ("cuda:99", {})]:
        with pytest.raises(UsageError):
            distributed.read_ranks(device, env)


@pytest.mark.parametrize("has_bf16", [False, True])
def test_precision_auto_is_bf16_where_there_are_instructions_for_it(has_bf16, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    assert [training_precision("auto", device) == "bf16" for device in ("cpu", "cuda", "mps")] == [has_bf16, True, False]
    for asked, device in itertools.product(("fp32", "bf16"), ("cpu", "cuda")):
        assert training_precision(asked, device) == asked


TWO = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from jpeg_dlm.util.distributed import all_mean, all_sum, barrier, world_size
from jpeg_dlm.util import distributed
ranks = distributed.setup("cpu", timeout_s=60.0)
assert world_size() == ranks.world == 2

def covariance_loss(mean, second):  # nonlinear in the global moments, like the regularizers
    cov = second - mean[:, None] * mean[None, :]
    return (cov - torch.diag(torch.diag(cov))).square().sum() + torch.relu(1 - torch.diag(cov).clamp_min(1e-6).sqrt()).mean()

def compare():
    torch.manual_seed(0)
    net, alone = (nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double() for _ in range(2))
    alone.load_state_dict(net.state_dict())
    batch = torch.randn(8, 3).double()

    # a global loss, and per-row losses that also use a global statistic, as standardized latents do
    ddp = DistributedDataParallel(net)  # named: it reduces the gradients only while it lives
    z = ddp(batch[4 * ranks.rank : 4 * ranks.rank + 4])
    mean, second = all_mean(z.mean(0)), all_sum(z.t() @ z) / 8
    (covariance_loss(mean, second) + (z - mean).pow(4).mean()).backward()

    w = alone(batch)
    m = w.mean(0)
    (covariance_loss(m, w.t() @ w / 8) + (w - m).pow(4).mean()).backward()
    assert alone[0].weight.grad.norm() > 1e-2
    for (name, a), b in zip(net.named_parameters(), alone.parameters()):
        error = (a.grad - b.grad).abs().max().item()
        assert error < 1e-12 * max(1.0, b.grad.abs().max().item()), (name, error)

compare()
barrier()
distributed.teardown()
assert world_size() == 1
"""


TOGETHER = """
import sys
from pathlib import Path
from jpeg_dlm.util import distributed
from jpeg_dlm.util.distributed import failed_together, main_first, on_main, shared
from jpeg_dlm.training.lock import Locked, lock_together
ranks, out = distributed.setup("cpu", timeout_s=60.0), Path(sys.argv[1])
done = []
assert shared(range(7), lambda i: done.append(i) or i * i) == [i * i for i in range(7)]
assert done == list(range(ranks.rank, 7, 2)) and shared([], done.append) == [] and shared([5], str) == ["5"]
assert on_main(lambda: f"rank {ranks.rank}") == "rank 0"
for kind in (KeyError, RuntimeError):  # of the main process alone
    try:
        on_main(lambda: (_ for _ in ()).throw(kind("no luck")))
    except (KeyError if ranks.is_main and kind is KeyError else RuntimeError) as error:
        assert "no luck" in str(error)
    else:
        raise AssertionError("no error")
with lock_together(out / "lock"):
    try:
        with lock_together(out / "lock"):
            raise AssertionError("held twice")
    except Locked as locked:
        assert locked.run == out / "lock" and "process" in locked.holder
main_first(lambda: (out / "fetched").exists() or (out / "fetched").write_text(str(ranks.rank)))
assert (out / "fetched").read_text() == "0"
assert failed_together("both")
distributed.FAIL_TOGETHER_S = 1.0
assert not (ranks.is_main and failed_together("main"))
distributed.teardown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [TWO, TOGETHER], ids=["gradients as of one", "shared work"])
def test_two_processes(script, tmp_path):
    (tmp_path / "script.py").write_text(script)
    done = launch(str(tmp_path / "script.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "error",
    [UsageError("a"), MissingPackageError("p", "x", "MAUVE"), Locked(Path("run"), "process 1"), StudyStopped("SIGTERM")],
)
def test_errors_reach_other_processes_as_they_are(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
    assert again.exit_code == error.exit_code
