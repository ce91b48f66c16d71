"""Text that goes out while an output is sampled: never more than is sure, and compared with the reply in the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.dialects.model_request import reply_message
from harness.tokens.chat_tokenizer import SampledOutput
from harness.tokens.output_reader import OutputReader
from harness.tokens.outputs.live_text import LiveText
from harness.tokens.syntaxes.harmony import Harmony
from harness.tokens.syntaxes.marked_calls import HERMES
from tests.unit.tokens.test_output_stream import CUTS, in_parts
from tests.unit.tokens.test_reading import ADD, FINAL, HARMONY_CALL, OUTPUTS, SYNTAXES, TOKENIZER, ids

READER = OutputReader(TOKENIZER, HERMES)
ANALYSIS, COMMENTARY = "<|channel|>analysis<|message|>", "<|channel|>commentary<|message|>"


def live(reader: OutputReader = READER) -> LiveText:
    """One that has been opened."""
    text = LiveText()
    text.open(reader.open(SampledOutput(()), [ADD]))
    return text


def test_nothing_is_said_before_it_is_opened():
    text = LiveText()
    text.hear(ids("hello"))
    text.settle(ids("hello"))

    assert (text.is_open, any(text.take()), text.has_spoken) == (False, False, False)


@given(syntax=st.sampled_from(SYNTAXES), output=OUTPUTS, cuts=CUTS)
def test_what_was_said_is_the_beginning_of_the_reply(syntax, output, cuts):
    """Whatever the model writes, or it is no answer on this stream."""
    reader = OutputReader(TOKENIZER, syntax)
    text, said = live(reader), ["", ""]
    for part in in_parts(output, cuts):
        text.hear(part)
        said = list(map("".join, zip(said, text.take(), strict=True)))
    reply = reply_message(reader.read(SampledOutput(output), [ADD]), "call_")

    begins = (reply.get("reasoning_content") or "").startswith(said[0]) and (reply["content"] or "").startswith(said[1])
    assert begins
    written = TOKENIZER.decode(output)
    assert text.agrees_with(reply) or "analysis" in written.partition("final")[2]


def test_ids_that_were_lost_end_what_is_said():
    text = live()
    text.hear(ids("one two"))
    first = text.take().content
    text.settle(ids("one"))
    text.hear(ids(" three"))

    assert first == "one two"
    assert not any(text.take())
    assert not text.agrees_with({"content": "one three"})
    assert text.agrees_with({"content": "one two three"})


def test_ids_that_nobody_heard_are_said():
    """Those that a turn had before it broke off, and those that came with the whole answer."""
    text = live()
    text.settle(ids("one"))
    text.hear(ids(" two"))
    text.settle(ids("one two three"))

    assert text.take().content == "one two three"


@pytest.mark.parametrize("thought", ["", f"{ANALYSIS}a<|end|><|start|>assistant"])
@pytest.mark.parametrize("last", [FINAL, HARMONY_CALL, f"{COMMENTARY}Done."])
def test_reasoning_that_follows_a_commentary_is_said_before_it(thought, last):
    """Content waits until no more reasoning is to come, so the stream ends as the turn does."""
    reader = OutputReader(TOKENIZER, Harmony())
    text, said = live(reader), ["", ""]
    output = ids(
        f"{thought}{COMMENTARY}Let me look.<|end|><|start|>assistant{ANALYSIS}b<|end|><|start|>assistant{last}"
    )
    for each in output:
        text.hear([each])
        said = list(map("".join, zip(said, text.take(), strict=True)))
    reply = reply_message(reader.read(SampledOutput(output), [ADD]), "call_")

    assert said[0] == reply["reasoning_content"] == ("a\nb" if thought else "b")
    assert reply["content"].startswith("Let me look.")
    assert said[1] == ("Let me look.\nyes" if last == FINAL else "")
    assert text.agrees_with(reply)


def test_reasoning_behind_a_final_message_is_not_said():
    """No dialect has a place for it; a reply that has some is sent when it is asked for again."""
    reader = OutputReader(TOKENIZER, Harmony())
    late = f"{FINAL}<|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
    text = live(reader)
    text.hear(ids(FINAL))
    said = text.take()
    text.hear(ids(late.removeprefix(FINAL)))

    assert (said.content, any(text.take())) == ("yes", False)
    assert not text.agrees_with({"content": "yes", "reasoning_content": "hm"})


def test_somebody_is_told_that_there_is_something():
    calls: list[int] = []
    text = live()
    text.tell = lambda: calls.append(1)
    text.hear(())
    text.settle(())
    text.hear(ids("a"))

    assert calls == [1]
