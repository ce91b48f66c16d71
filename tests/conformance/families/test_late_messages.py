"""What clients add to a history beside questions and results continues exactly where the family can continue at all."""

import pytest

from harness.errors import MalformedRequest
from harness.tokens.conversations import exchange
from harness.tokens.verify import Branched, FamilyUnderTest, check_delimiter, check_prompt
from tests.conformance.families.family import Family

LATE_SYSTEM = [
    ("answer", ("user", "system")),
    ("answer", ("system", "user")),
    ("answer", ("developer", "user", "system")),
    ("answer", ("system",)),
    ("1 call", ("tool", "system")),
    ("1 call", ("system", "tool")),
    ("2 calls", ("tool", "system", "tool", "user")),
]
"""The sampled answer, and the roles behind it."""
OWN_ANSWERS = [
    ("answer", ()),
    ("answer", ("user", "answer")),
    ("answer", ("user", "answer", "user")),
    ("1 call", ("tool", "answer", "user")),
    ("answer", ("user", "1 call", "tool")),
]
LEADS = [(), ("system", "developer")]
REWRITTEN = {
    ("mistral_nemo", ("tool", "system", "tool", "user")),
    ("mistral_nemo", ("tool", "answer", "user")),
    ("mistral_nemo", ("user", "1 call", "tool")),
    ("llama3_2", ("tool", "system", "tool", "user")),
}
"""Mistral's template shows results only until the next question, Llama's refuses two calls."""


def verdict(family: Family, roles: tuple[str, ...], new: int) -> str:
    """Whether the family goes on there as its template says, branches, or refuses."""
    texts = [f"text {i}" for i in range(len(roles))]
    case = exchange(roles, new, texts, any("call" in role for role in roles))
    under_test = FamilyUnderTest(family.chat, family.template)
    try:
        assert check_prompt(under_test, case) is None
        assert check_delimiter(under_test, case) is None
    except Branched:
        return "branch"
    except MalformedRequest:
        return "refused"
    return "exact"


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize(("sampled", "new"), LATE_SYSTEM + OWN_ANSWERS)
def test_late_messages_go_on_where_the_family_goes_on(family, lead, sampled, new):
    """As exactly as a question, or as the results of those calls, would there; whatever stands at the head."""
    plain = {"answer": ("user",), "1 call": ("tool",), "2 calls": ("tool", "tool")}
    ordinary = verdict(family, (*lead, "user", sampled, *plain[sampled]), len(plain[sampled]))
    has_calls = "1 call" in new  # of the client's own, and the family may not show any
    found = verdict(family, (*lead, "user", sampled, *new), len(new))

    if ordinary == "exact" and not (has_calls and not family.chat.describe().shows_calls):
        assert found == "exact" or (family.name, new) in REWRITTEN


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_late_system_message_is_in_the_prompt_where_it_was_said(family, role):
    """Behind the answer before it and before the one that comes, in every family."""
    messages = [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "more"},
        {"role": role, "content": "be brief"},
    ]
    text = family.chat.tokenizer.decode(family.chat.render_ids(messages, []))

    assert text.count("be brief") == 1
    assert "be brief" in text.rpartition("answer")[2]
