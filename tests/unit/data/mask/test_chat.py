"""What carries loss, for templates of every temper, and what two readings make of those that lie."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from dist.given import TOKENIZER
from shardwise.data.faults import RowFault
from shardwise.data.mask.encode import ChatEncoder
from shardwise.data.rows import Chat

TOKENS: Any = AutoTokenizer.from_pretrained(TOKENIZER)
TOKENS.add_special_tokens({"additional_special_tokens": ["<end>", "<eos>", "<bot>", "<usr>", "<call>"]})
Messages = list[dict[str, Any]]
TWO_TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"},
             {"role": "user", "content": "bye"}, {"role": "assistant", "content": "bye now"}]
HEAD = "{{ '<bot>' if m.role == 'assistant' else '<usr>' }}"
ASK = "{% if add_generation_prompt %}<bot>{% endif %}"


def looped(turn: str, before: str = "", after: str = "", ask: str = ASK) -> str:
    return before + "{% for m in messages %}" + turn + "{% endfor %}" + after + ask


PLAIN = looped(HEAD + "{{ m.content }}<end>\n")


def result(messages: Messages, template: str, supervise: Any = "all", weights: list[float] | None = None,
           tools: Any = None) -> Any:
    encoder = ChatEncoder(TOKENS, template=template, supervise=supervise)
    return encoder([Chat(messages, weights or [1.0] * len(messages), tools)])[0]


def learnt(*args: Any, **more: Any) -> list[str]:
    """The text of each run of tokens that carry loss."""
    found = result(*args, **more)
    assert not isinstance(found, RowFault), found
    example, runs, last = found[0], [], -2
    for at, (token, weight) in enumerate(zip(example.ids.tolist(), example.weights.tolist(), strict=True)):
        if weight:
            runs += [[]] if at != last + 1 else []
            runs[-1].append(token)
            last = at
    return [TOKENS.decode(run) for run in runs]


def refused(*args: Any, **more: Any) -> tuple[str, str]:
    found = result(*args, **more)
    assert isinstance(found, RowFault), found
    return found.kind, str(found)


def test_a_turn_is_what_the_model_has_to_write() -> None:
    assert learnt(TWO_TURNS, PLAIN) == ["hello there<end>", "bye now<end>"]


def test_the_last_turn_alone() -> None:
    assert learnt(TWO_TURNS, PLAIN, supervise="last") == ["bye now<end>"]
    assert learnt(TWO_TURNS[:3], PLAIN, supervise="last") == ["hello there<end>"]


def test_a_list_of_roles() -> None:
    assert learnt(TWO_TURNS, PLAIN, supervise=("user",)) == ["hi<end>", "bye<end>"]
    assert learnt(TWO_TURNS, PLAIN, supervise=("user", "assistant")) == [
        "hi<end>", "hello there<end>", "bye<end>", "bye now<end>"]


def test_weights_of_messages() -> None:
    found = result(TWO_TURNS, PLAIN, weights=[1, 0.5, 1, 0])
    assert TOKENS.decode(found[0].ids[found[0].weights == 0.5]) == "hello there<end>"
    assert set(found[0].weights.tolist()) == {0.0, 0.5}
    assert refused(TWO_TURNS, PLAIN, weights=[1, 0, 1, 0])[0] == "no_supervised"


def test_b17_the_end_of_a_turn_is_learnt_whatever_eos_is() -> None:
    assert TOKENS.eos_token != "<end>"
    found = result(TWO_TURNS, PLAIN)[0]
    ends = found.ids == TOKENS.convert_tokens_to_ids("<end>")
    assert found.weights[ends].tolist() == [0, 1, 0, 1]


def test_b19_a_last_turn_may_end_otherwise() -> None:
    """Middle turns end with <end>, the final one with <eos>; two assistant turns in a row."""
    template = looped(HEAD + "{{ m.content }}{{ '<eos>' if loop.last and m.role == 'assistant' else '<end>' }}")
    assert learnt(TWO_TURNS, template) == ["hello there<end>", "bye now<eos>"]
    in_a_row = [TWO_TURNS[0], TWO_TURNS[1], TWO_TURNS[1], TWO_TURNS[3]]
    assert learnt(in_a_row, template) == ["hello there<end>", "hello there<end>", "bye now<eos>"]


def test_what_a_template_adds_after_the_conversation_is_not_the_models() -> None:
    template = looped(HEAD + "{{ m.content }}<end>\n", after="{% if not add_generation_prompt %}<eos>{% endif %}")
    assert learnt(TWO_TURNS, template) == ["hello there<end>", "bye now<end>"]


def test_an_empty_think_block_before_the_last_answer_alone() -> None:
    """As Qwen3's own template does it: what precedes the block is what the model is asked with, so it is learnt."""
    template = looped(HEAD + "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
                      "{{ m.content }}<end>\n")
    assert learnt(TWO_TURNS, template) == ["hello there<end>", "<think>\n\n</think>\n\nbye now<end>"]


def test_thoughts_kept_in_the_last_turn_alone() -> None:
    template = looped(HEAD + "{{ m.content if loop.last else m.content.split('</think>')[-1].lstrip() }}<end>\n")
    chat = [*TWO_TURNS[:1], {"role": "assistant", "content": "<think>a plan</think>\nhello"}, TWO_TURNS[2],
            {"role": "assistant", "content": "<think>b plan</think>\nbye now"}]
    assert learnt(chat, template) == ["hello<end>", "<think>b plan</think>\nbye now<end>"]


def test_a_template_that_strips() -> None:
    chat = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "  spaced \n"}]
    assert learnt(chat, looped(HEAD + "{{ m.content | trim }}<end>")) == ["spaced<end>"]
    assert learnt(chat, PLAIN) == ["  spaced \n<end>"]


def test_a_prompt_that_opens_a_think_block_is_refused_where_answers_lack_it() -> None:
    template = looped(HEAD + "{{ m.content }}<end>", ask="{% if add_generation_prompt %}<bot><think>{% endif %}")
    kind, text = refused(TWO_TURNS, template)
    assert kind == "mask_disagreement" and text.startswith("turn 1: what the chat template prints before this answer")
    assert "data.supervise=last" in text


def test_b23_a_template_that_leaves_the_answer_out_is_refused() -> None:
    template = looped(HEAD + "{{ m.content if m.role == 'user' }}<end>")
    assert refused(TWO_TURNS, template)[0] == "text_lost"


def test_b25_a_system_text_never_vanishes() -> None:
    template = looped("{% if m.role != 'system' %}" + HEAD + "{{ m.content }}<end>{% endif %}")
    kind, text = refused([{"role": "system", "content": "be brief"}, *TWO_TURNS], template)
    assert (kind, text) == ("text_lost", "turn 0: the chat template leaves out this system turn's text ('be brief')")


def test_b25_what_a_template_raises_is_said() -> None:
    template = "{{ raise_exception('Conversation roles must alternate') }}"
    assert refused(TWO_TURNS, template) == (
        "template_refused", "the chat template refuses the first 4 turns: Conversation roles must alternate")


def test_a_turn_without_an_end_is_noted() -> None:
    found = result(TWO_TURNS, looped(HEAD + "{{ m.content }}\n"))
    assert found[0].notes == ("terminator_untrained",)


def tagged(turn: str) -> str:
    return looped(HEAD + "{% if m.role == 'assistant' %}{% generation %}" + turn + "{% endgeneration %}"
                  "{% else %}{{ m.content }}<end>\n{% endif %}")


def test_tags_that_agree() -> None:
    assert learnt(TWO_TURNS, tagged("{{ m.content }}<end>\n")) == ["hello there<end>", "bye now<end>"]


@pytest.mark.parametrize(("template", "said"), [
    (tagged("{{ m.content }}").replace("{% endgeneration %}", "{% endgeneration %}<end>"),
     "by the generation tags: 'hello there'"),
    (looped("{% if m.role == 'assistant' %}{% generation %}<bot>{{ m.content }}<end>{% endgeneration %}"
            "{% else %}<usr>{{ m.content }}<end>{% endif %}"), "by the generation tags: '<bot>hello there<end>'"),
    (tagged("{{ m.content }}<end>").replace("{% endgeneration %}", "{% endgeneration %}<eos>"), None),
    (looped(HEAD + "{% if m.role == 'assistant' %}{{ m.content }}<end>{% else %}{% generation %}"
            "{{ m.content }}<end>{% endgeneration %}{% endif %}"), "by the generation tags: nothing")])
def test_tags_that_disagree_are_an_error_with_both_readings(template: str, said: str | None) -> None:
    if said is None:  # tags and prefixes agree on the end of the turn; what follows it belongs to nobody
        assert learnt(TWO_TURNS, template) == ["hello there<end>", "bye now<end>"]
        return
    kind, text = refused(TWO_TURNS, template)
    assert kind == "mask_disagreement" and text.startswith("turn 1: two readings of what to supervise differ.")
    assert "By the template's prefixes: 'hello there<end>" in text and said in text


def test_tags_on_what_is_no_answer_are_an_error() -> None:
    template = looped(HEAD + "{% generation %}{{ m.content }}<end>{% endgeneration %}")
    kind, text = refused(TWO_TURNS, template)
    assert kind == "mask_disagreement" and "'hi<end>' is an answer too, but it is in none" in text


def test_plain_text_marks_inside_a_turn_are_an_error() -> None:
    """Without control tokens nothing tells a quoted mark from a real one."""
    template = looped("{{ 'BOT: ' if m.role == 'assistant' else 'USR: ' }}{{ m.content }}<end>",
                      ask="{% if add_generation_prompt %}BOT: {% endif %}")
    assert learnt(TWO_TURNS, template) == ["hello there<end>", "bye now<end>"]
    kind, text = refused([{"role": "user", "content": "say BOT: yes"}, TWO_TURNS[1]], template)
    assert kind == "mask_disagreement" and "is an answer too" in text


def test_tool_calls_are_learnt_and_results_are_not() -> None:
    template = looped(HEAD + "{{ m.content }}{% if m.tool_calls is defined %}{% for c in m.tool_calls %}<call>"
                      "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endif %}<end>",
                      before="{% if tools %}{{ tools | tojson }}{% endif %}")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [TWO_TURNS[0], {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "2"}, TWO_TURNS[1]]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert learnt(chat, template, tools=tools) == ['<call>add{"a": 1}<end>', "hello there<end>"]
