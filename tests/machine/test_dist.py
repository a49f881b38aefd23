"""Ranks and collectives: one process here, two real gloo processes in the slow tests."""

import pickle
from pathlib import Path

import pytest
import torch
from small_runs import launch

from jpeg_dlm.errors import MissingPackageError, UsageError
from jpeg_dlm.machine import collectives, dist
from jpeg_dlm.studies.workshop import StudyStopped
from jpeg_dlm.training.lock import Locked


def test_one_process_needs_nothing(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    ranks = dist.setup("cpu")
    assert ranks == dist.Ranks(0, 1, 0, torch.device("cpu")) and ranks.is_main
    assert not torch.distributed.is_initialized() and collectives.world_size() == 1
    x = torch.randn(3, requires_grad=True)
    assert collectives.all_sum(x) is x and collectives.all_mean(x) is x
    collectives.barrier()
    dist.teardown()


def test_ranks_come_from_the_environment():
    ranks = dist.read_ranks("cpu", {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert (ranks.rank, ranks.world, ranks.local_rank, ranks.is_main) == (3, 8, 1, False)


@pytest.mark.parametrize("device, env, word", [
    ("cpu", {"WORLD_SIZE": "2"}, "torchrun"), ("cpu", {"WORLD_SIZE": "two"}, "WORLD_SIZE"),
    ("cpu", {"RANK": "2", "WORLD_SIZE": "2"}, "RANK 2"), ("toaster", {}, "'toaster' is not a device"),
    ("cuda:99", {}, "does not exist"),
])  # fmt: skip
def test_wrong_environments_are_refused(device, env, word):
    with pytest.raises(UsageError, match=word):
        dist.read_ranks(device, env)


TWO = """
import sys, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from jpeg_dlm.machine.collectives import all_mean, all_sum, barrier, world_size
from jpeg_dlm.machine import dist
ranks = dist.setup("cpu", timeout_s=60.0)
assert world_size() == ranks.world == 2

# forward, and the input is left alone
x = torch.tensor([1.0, 2.0]) * (ranks.rank + 1)
assert torch.equal(all_sum(x), torch.tensor([3.0, 6.0])) and torch.equal(all_mean(x), torch.tensor([1.5, 3.0]))
assert torch.equal(x, torch.tensor([1.0, 2.0]) * (ranks.rank + 1))
assert torch.equal(all_sum(torch.arange(4).view(2, 2).t()), 2 * torch.arange(4).view(2, 2).t())

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

# the gradient of a gradient passes, too
y = torch.tensor(2.0 + ranks.rank, requires_grad=True)
(g,) = torch.autograd.grad(all_sum(y).pow(3), y, create_graph=True)
assert g.item() == 2 * 3 * 25.0
(h,) = torch.autograd.grad(g, y)
assert h.item() == 2 * 2 * 6 * 5.0
barrier()
dist.teardown()
assert world_size() == 1
sys.stdout.write(f"agreed {ranks.rank}\\n")
"""


@pytest.mark.slow
def test_two_processes_apply_the_gradient_of_one(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO)
    done = launch(str(script))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "agreed 0", "agreed 1"]


TOGETHER = """
import sys
from pathlib import Path
from jpeg_dlm.machine import collectives, dist
from jpeg_dlm.machine.collectives import failed_together, main_first, on_main, shared
from jpeg_dlm.training.lock import Locked, lock_together
ranks, out = dist.setup("cpu", timeout_s=60.0), Path(sys.argv[1])
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
collectives.FAIL_TOGETHER_S = 1.0
assert not (ranks.is_main and failed_together("main"))
dist.teardown()
"""


@pytest.mark.slow
def test_two_processes_share_work_and_what_the_main_one_says(tmp_path):
    script = tmp_path / "together.py"
    script.write_text(TOGETHER)
    done = launch(str(script), str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "error",
    [UsageError("a"), MissingPackageError("p", "x", "MAUVE"), Locked(Path("run"), "process 1"), StudyStopped("SIGTERM")],
)
def test_errors_reach_other_processes_as_they_are(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
    assert again.exit_code == error.exit_code


WAITING = """
import os, sys, time, torch
from jpeg_dlm.machine.collectives import all_sum, barrier
from jpeg_dlm.machine import dist
ranks = dist.setup("cpu")
with dist.step_timeout(1.0):
    pass
if ranks.is_main:
    time.sleep(3)  # preparing text
barrier()
with dist.step_timeout(1.0):
    try:
        if ranks.is_main:
            time.sleep(4)
            sys.stdout.write("slept\\n")
        else:
            all_sum(torch.ones(1))
    except RuntimeError as error:
        sys.stdout.write("gave up\\n" if "Timed out" in str(error) else str(error))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
def test_setting_up_may_take_longer_than_a_step(tmp_path):
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    done = launch(str(script))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "gave up", "slept"]
