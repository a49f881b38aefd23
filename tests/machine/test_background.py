"""Jobs in the background: in order, errors told once, waited for unless the process is to leave at once."""

import threading

import pytest

from jpeg_dlm.machine.background import Background


def fail(sentence):
    raise ValueError(sentence)


def test_jobs_run_in_order_and_none_is_waited_for_too_long():
    first, second, ends = threading.Event(), threading.Event(), []
    with Background() as background:
        background.wait()  # for nothing
        one = background.start(lambda: (first.wait(60), ends.append(1)))
        background.start(lambda: (second.wait(60), ends.append(2)))
        first.set()
        background.wait(one)
        assert ends == [1] and not second.is_set()
        second.set()
    assert ends == [1, 2]


@pytest.mark.parametrize("notice", [Background.wait, lambda background: background.start(print)], ids=["wait", "start"])
def test_the_first_error_is_told_once_and_later_jobs_still_run(notice):
    background, ends = Background(), []
    with background:
        background.start(lambda: fail("first"))
        last = background.start(lambda: (ends.append(1), fail("second")))
        last.wait(60)
        with pytest.raises(ValueError, match="first"):
            notice(background)
        background.wait()
    assert ends == [1]


def test_an_error_is_told_at_the_end_of_the_block():
    with pytest.raises(ValueError, match="of the job"), Background() as background:
        background.start(lambda: fail("of the job"))
    with pytest.raises(ValueError, match="of the job") as raised, Background() as background:
        background.start(lambda: fail("of the job"))
        raise KeyError("of the block")
    assert isinstance(raised.value.__context__, KeyError)


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


def test_the_thread_ends_with_the_block():
    before = set(threading.enumerate())
    with Background() as background:
        background.start(lambda: None)
        (thread,) = set(threading.enumerate()) - before
    thread.join(60)
    assert not thread.is_alive()
