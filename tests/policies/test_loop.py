"""Loops, against the definition spelled out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies import Decision, Token
from policies.loop import Loop
from tests.policies.run import decide, laws

words = st.lists(st.sampled_from("abc"), max_size=40)
rules = st.builds(Loop, ngram=st.integers(1, 6), repeats=st.integers(2, 4), tokens=st.integers(2, 12))


def spoken(texts) -> list[Token]:
    return [Token(-0.1, text=text) for text in texts]


def ends_in_a_loop(texts: list[str], rule: Loop) -> bool:
    """The last tokens are n-periodic over at least `repeats` blocks and `tokens` tokens, for some n."""
    for n in range(1, rule.ngram + 1):
        size = max(n * rule.repeats, rule.tokens)
        tail = texts[len(texts) - size :] if len(texts) >= size else []
        if tail and all(tail[i] == tail[i - n] for i in range(n, size)):
            return True
    return False


@laws
@given(words, rules)
def test_a_loop_is_found_at_the_token_that_completes_it(texts, rule):
    first = next((end for end in range(len(texts) + 1) if ends_in_a_loop(texts[:end], rule)), None)
    decision, read = decide(rule, spoken(texts))
    if first is None:
        assert decision == Decision.keep("no_match")
    else:
        assert (decision, read) == (Decision.escalate("loop"), first)


@laws
@given(words, st.lists(st.sampled_from("xyz"), min_size=1, max_size=6))
def test_whatever_comes_before_a_loop_does_not_hide_it(before, block):
    rule = Loop(ngram=6, repeats=4, tokens=8)
    assert decide(rule, spoken([*before, *block * 10]))[0] == Decision.escalate("loop")


def test_a_ruled_line_is_no_loop_by_default():
    assert decide(Loop(), spoken("-" * 40 + "the end"))[0] == Decision.keep("no_match")
    assert decide(Loop(), spoken("-" * 60))[0] == Decision.escalate("loop")


def test_tokens_without_text_escalate_and_say_so():
    assert decide(Loop(to="huge"), [Token(-0.1)])[0] == Decision.escalate("no_signal", "huge")
