"""Rules on the request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Decision, Verdict
from policies.request_rules import JsonAsked, Keywords, Language, Length, Regex, Tools
from policies.scripts import main_script
from tests.policies.run import FACTS, decide, facts, laws, reason, verdict

HIT = {
    Length(characters=9): (facts(characters=10), "prompt_length"),
    Length(tokens=5): (facts(prompt_tokens=6), "prompt_length"),
    Keywords(words=("prove",)): (facts(text="Now PROVE it."), "keyword"),
    Regex(pattern=r"\d{3}"): (facts(text="call 911"), "pattern"),
    Tools(): (facts(has_tools=True), "tools"),
    JsonAsked(): (facts(wants_json=True), "json_asked"),
    Language(): (facts(text="что это"), "language"),
}
NEED_TEXT = [Keywords(), Regex(), Language()]


@pytest.mark.parametrize("rule", HIT, ids=lambda rule: rule.method)
def test_a_match_is_decided_before_the_attempt_and_may_name_a_tier(rule):
    hit, word = HIT[rule]
    assert rule.begin().on_request(hit) == Decision.escalate(word)
    assert rule.model_copy(update={"to": "huge"}).begin().on_request(hit) == Decision.escalate(word, "huge")
    assert rule.begin().score() is None


@pytest.mark.parametrize("rule", HIT, ids=lambda rule: rule.method)
def test_no_match_lets_the_small_model_answer(rule):
    easy = facts(characters=9, prompt_tokens=5, text="hello there 12")
    judge = rule.begin()
    assert judge.on_request(easy) == Decision.keep("no_match")


@laws
@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_a_longer_prompt_never_escalates_less(shorter, more, bound):
    short, long = facts(prompt_tokens=shorter), facts(prompt_tokens=shorter + more)
    if verdict(Length(tokens=bound), facts=short) is Verdict.ESCALATE:
        assert verdict(Length(tokens=bound), facts=long) is Verdict.ESCALATE
    assert (verdict(Length(tokens=bound), facts=short) is Verdict.ESCALATE) == (shorter > bound)


def test_what_was_not_measured_is_not_zero():
    assert decide(Length(tokens=5))[0] == Decision.escalate("no_signal")
    assert decide(Length(tokens=None))[0] == Decision.keep("no_match")
    ids = facts(characters=None, prompt_tokens=6)
    assert decide(Length(), facts=ids)[0] == Decision.escalate("no_signal")
    assert decide(Length(tokens=5), facts=ids)[0] == Decision.escalate("prompt_length")
    assert decide(Length(characters=None, tokens=6), facts=ids)[0] == Decision.keep("no_match")
    for rule in NEED_TEXT:
        assert decide(rule)[0] == Decision.escalate("no_signal")
        assert decide(rule, facts=facts(text=""))[0] == Decision.keep("no_match")


@pytest.mark.parametrize(
    ("word", "text", "found"),
    [
        ("proof", "a waterproof coat", False),
        ("proof", "proofs", False),
        ("proof", "(Proof)", True),
        ("step by step", "Step  by\nstep, please", True),
        ("don't", "I don\u2019t", True),
        ("c++", "in C++?", True),
        ("c++", "in abc++", False),
        ("証明", "これを証明して", True),
        ("ＡＢ", "ab", True),
        ("straße", "STRASSE", True),
        (".", "no dot here", False),
    ],
)
def test_keywords_are_whole_words_in_any_case_and_never_patterns(word, text, found):
    assert (reason(Keywords(words=(word,)), facts=facts(text=text)) == "keyword") is found


def test_the_default_pattern_finds_code_and_latex():
    for text in ("```py\n1\n```", r"what is \(x\)", "$$x$$", r"\begin{matrix}"):
        assert reason(Regex(), facts=facts(text=text)) == "pattern"
    assert reason(Regex(), facts=facts(text="it costs $5")) == "no_match"


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Where is it?", "latin"),
        ("Ærøskøbing, Ærø", "latin"),
        ("Где это?", "cyrillic"),
        ("这是什么", "han"),
        ("これは何ですか", "kana"),
        ("ｶﾀｶﾅ", "kana"),
        ("東京大学附属図書館で", "kana"),
        ("东京大学附属图书馆在这里の", "han"),
        ("이것은 무엇입니까", "hangul"),
        ("ما هذا", "arabic"),
        ("यह क्या है", "devanagari"),
        ("Τι είναι αυτό", "greek"),
        ("מה זה", "hebrew"),
        ("นี่คืออะไร", "thai"),
        ("რა არის", "other"),
        ("ＡＢＣ", "latin"),
        ("12 + 3 = ?", None),
        ("", None),
        ("Explain 好 in one word", "latin"),
    ],
)
def test_the_script_of_a_text(text, script):
    assert main_script(text) == script
    expected = "no_match" if script in ("latin", None) else "language"
    assert reason(Language(), facts=FACTS._replace(text=text)) == expected


@laws
@given(st.text(max_size=200))
def test_any_text_has_a_script_or_no_letter(text):
    assert (main_script(text) is None) == (not any(letter.isalpha() for letter in text))
