"""A chat template that loops ends with the time limit, and costs nobody else an interruption."""

import threading
import time

import pytest
from templates import FAMILIES, template_tokenizer

from ragcache import prompt, runtime
from ragcache.engine.conversation import Conversation
from ragcache.errors import TimedOutError

TURNS = [{"role": "user", "content": "Who is here?"}]
LOOPS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% for i in range(9) %}{{ f(n - 1) if n else '' }}{% endfor %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_template_that_loops_is_interrupted(loop, monkeypatch):
    monkeypatch.setattr(prompt, "TEMPLATE_S", 0.3)
    tokenizer = template_tokenizer(sorted(FAMILIES)[0])
    good = Conversation(tokenizer, TURNS).as_written(None)
    template, tokenizer.chat_template = tokenizer.chat_template, loop
    with pytest.raises(TimedOutError, match=r"chat template takes over 0\.3 s.*another chat_template"):
        Conversation(tokenizer, TURNS).as_written(None)
    tokenizer.chat_template = template
    assert Conversation(tokenizer, TURNS).as_written(None) == good


def forever():
    while True:
        pass


def test_code_that_catches_every_exception_is_interrupted():
    def stubborn():
        while True:
            try:
                time.monotonic()
            except Exception:
                continue

    with pytest.raises(TimeoutError), runtime.bounded(0.1):
        stubborn()


def test_only_the_late_thread_is_interrupted():
    """Others work on, before and after; nothing is raised behind the block."""
    failed = []

    def work(seconds: float) -> None:
        try:
            with runtime.bounded(60):
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    pass
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(1.0,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        with pytest.raises(TimeoutError), runtime.bounded(0.05):
            forever()
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            pass
    for thread in threads:
        thread.join()
    assert failed == []
    assert runtime._DEADLINES == {}
