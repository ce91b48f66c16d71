"""What is promised of every family, over generated conversations, with its real tokenizer and template."""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import MalformedRequest
from harness.tokens.chat_tokenizer import SampledOutput, SampledTurn
from harness.tokens.conversations import Exchange, exchange
from harness.tokens.verify import (
    CHECKS,
    Branched,
    FamilyUnderTest,
    Property,
    check_closed,
    check_delimiter,
    check_prompt,
)
from tests.conformance.families.family import Family
from tests.conformance.families.page import verdicts_of
from tests.conformance.families.sampling import CONTENTS

EXAMPLES_PER_FAMILY = int(os.environ.get("HARNESS_SOAK_EXAMPLES", "20"))
"""Times the number of families: hundreds of conversations, and sixty thousand in `make soak`."""

ROUNDS = st.sampled_from(
    [("user", "answer"), ("user", "1 call", "tool", "answer"), ("user", "2 calls", "tool", "tool", "answer")]
)
LAST = st.sampled_from([("user",), ("user",), ("user", "1 call", "tool")])
STEPS = st.sampled_from(
    [("answer", ("user",)), ("answer", ("system", "user")), ("1 call", ("tool",)), ("2 calls", ("tool", "tool"))]
)


@st.composite
def conversations(draw: st.DrawFn) -> Exchange:
    """Any conversation: roles as agents bring them about, texts as nobody would write them."""
    lead = draw(st.sampled_from([(), ("system",), ("developer",)]))
    history = [role for turns in draw(st.lists(ROUNDS, max_size=2)) for role in turns]
    sampled, following = draw(STEPS)
    roles = (*lead, *history, *draw(LAST), sampled, *following)
    has_tools = any("call" in role for role in roles) or draw(st.booleans())
    return exchange(
        roles, len(following), draw(st.lists(CONTENTS, min_size=len(roles), max_size=len(roles))), has_tools
    )


def verified(family: Family) -> FamilyUnderTest:
    return FamilyUnderTest(family.chat, family.template)


@pytest.mark.parametrize("checked", Property)
def test_every_property_holds(family, checked):
    """All role sequences up to two rounds, unicode, white space at the edges, very long texts."""
    verdict = next(verdict for verdict in verdicts_of(family.name) if verdict.checked_property is checked)

    described = family.chat.describe()
    keeps_calls = described.shows_calls and described.reads_calls
    is_kept = {Property.TOOLS: described.shows_tools, Property.CALLS: keeps_calls}.get(checked, True)
    assert (verdict.mismatch is None) if is_kept else not verdict.holds
    assert verdict.mismatch is not None or verdict.cases > verdict.refused


@pytest.mark.timeout(3600)
@settings(max_examples=EXAMPLES_PER_FAMILY, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(case=conversations(), output=st.lists(st.integers(0, 60_000), max_size=5))
def test_any_conversation_goes_on_as_the_template_says(family, case, output):
    """Whatever was sampled, a delimiter says what the template says there, in ids of the vocabulary."""
    chat = family.chat
    try:
        prompt = chat.render_ids(case.prior, case.tools)
    except MalformedRequest:
        return
    previous = SampledTurn(case.reply, output, prompt[-64:], case.opens_with_system, case.after_tools)
    extension = chat.extend_ids(previous, case.new, case.tools)
    chat.parse(SampledOutput(output, prompt[-64:]), case.tools)
    for check in (check_prompt, check_delimiter, check_closed):
        try:
            assert check(verified(family), case) is None
        except (Branched, MalformedRequest):
            assert check is not check_prompt
    if extension is not None:
        assert all(0 <= token_id < chat.tokenizer.vocab_size for token_id in extension)


@settings(max_examples=EXAMPLES_PER_FAMILY, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(text=st.text(st.characters(max_codepoint=127)) | CONTENTS, ids=st.lists(st.integers(0, 300_000)))
def test_texts_and_ids_are_those_of_the_library(family, text, ids):
    """Looked up or not; markers written out in a text are markers, or characters."""
    library, tokenizer = family.library, family.chat.tokenizer

    assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)
    if not any(token in text for token in tokenizer.added_tokens):
        assert tokenizer.encode_plain(text) == tokenizer.encode(text)


def test_every_property_is_checked():
    """None is forgotten."""
    assert set(CHECKS) == set(Property)
