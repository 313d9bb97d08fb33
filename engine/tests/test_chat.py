"""Chat templates: what well-meaning ones find, and what hostile ones do not get."""

from __future__ import annotations

import time

import pytest

from fitment.errors import FitmentError, Problems
from fitment_engine.chat import ChatTemplate

HELLO = [{"role": "user", "content": "hi"}]
CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def test_a_conversation_becomes_its_text() -> None:
    template = ChatTemplate(CHATML)
    assert template.render(HELLO) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(HELLO, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(("source", "text"), [
    ("{{ bos_token }}{{ messages[0].content | trim }}{{ eos_token }}", "<s>hi</s>"),
    ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
    ("{{ {'ä': 1} | tojson }}", '{"ä": 1}'),
    ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
    ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
    ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
    ("{{ tools is defined }}", "False"),
])
def test_templates_find_what_they_expect(source: str, text: str) -> None:
    assert ChatTemplate(source, "<s>", "</s>").render(HELLO) == text


HOSTILE = {
    "a huge range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "a repeated text": "{{ 'a' * 10**10 }}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "doubling": "{% set ns = namespace(a='aaaaaaaa') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
    "a wide format": "{{ '%1000000000d' % 1 }}",
    "a wide centre": "{{ 'a' | center(2000000000) }}",
    "a lists' product": "{{ [0] * 10**9 }}",
    "a macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "endless output": "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "an escape by attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "an escape by format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "an escape by a function": "{{ raise_exception.__globals__['sys'].exit() }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "an include": "{% include '/etc/passwd' %}",
    "no syntax": "{% for %}",
    "a call of nothing": "{{ nothing() }}",
    "its own refusal": "{{ raise_exception('no system role here') }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_hostile_templates_are_errors_within_their_limits(source: str) -> None:
    template = ChatTemplate(source)
    started = time.monotonic()
    with pytest.raises(FitmentError, match="chat template"):
        template.render(HELLO)
    assert time.monotonic() - started < 25  # of a second's processor time, on a machine that may be busy


def test_after_a_template_was_ended_it_can_be_asked_again() -> None:
    template = ChatTemplate("{% if messages | length > 1 %}{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
                            "{% endif %}{{ messages[0].content }}")
    with pytest.raises(FitmentError, match="processor time"):
        template.render(HELLO * 2)
    assert template.render(HELLO) == "hi"


def test_errors_say_where_and_what() -> None:
    with pytest.raises(FitmentError, match="line 2"):
        ChatTemplate("a\n{% for %}").render(HELLO)
    with pytest.raises(FitmentError, match="no system role here"):
        ChatTemplate("{{ raise_exception('no system role here') }}").render(HELLO)
    with pytest.raises(FitmentError, match="--chat-template"):
        ChatTemplate(None).render(HELLO)


def test_content_may_be_parts_of_text() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ChatTemplate("{{ messages[0].content }}").render(parts) == "a\nb"


@pytest.mark.parametrize("messages", ["hi", {"role": "user"}, [], None, 5])
def test_what_is_no_conversation_is_said(messages: object) -> None:
    with pytest.raises(Problems, match="wanted a list"):
        ChatTemplate(CHATML).render(messages)  # type: ignore[arg-type]


def test_all_wrong_messages_are_named_at_once() -> None:
    with pytest.raises(Problems) as caught:
        ChatTemplate(CHATML).render([{"role": 1, "content": "x"}, {"role": "user", "content": 5}, "x", {"role": "user", "content": [{}]}])  # type: ignore[list-item]
    assert all(f"message {i}" in str(caught.value) for i in range(4))
