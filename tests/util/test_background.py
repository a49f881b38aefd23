"""Jobs in the background: in order, errors told once, waited for unless the process is to leave at once."""

import threading

import pytest

from jpeg_dlm.util.background import Background


def fail(sentence):
    raise ValueError(sentence)


@pytest.mark.parametrize("notice", [Background.wait, lambda background: background.start(print)], ids=["wait", "start"])
def test_the_first_error_is_told_once_and_later_jobs_still_run(notice):
    background, ends, both = Background(), [], threading.Event()
    with background:
        background.start(lambda: (both.wait(60), fail("first")))
        last = background.start(lambda: (ends.append(1), fail("second")))
        both.set()
        last.wait(60)
        with pytest.raises(ValueError, match="first"):
            notice(background)
        background.wait()
    assert ends == [1]


def test_leaving_waits_unless_the_process_exits():
    goes_on, ended = threading.Event(), threading.Event()
    with pytest.raises(SystemExit), Background() as background:
        background.start(lambda: (goes_on.wait(60), ended.set()))
        raise SystemExit(130)
    assert not ended.is_set()
    goes_on.set()
    with pytest.raises(KeyError), Background() as background:
        ended = background.start(lambda: None)
        raise KeyError
    assert ended.is_set()
