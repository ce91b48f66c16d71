"""Two engines are compared over the same prompts, and a difference is named."""

from harness.engines.examine.comparison import QUESTIONS, compare_engines
from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.tokens.model_family import open_chat_tokenizer
from tests.toy_model import write_toy_model


async def test_an_engine_is_close_to_itself_and_not_to_one_that_says_other_things(tmp_path):
    """Equal scripts agree to the last token; another word is found where it stands."""
    chat = open_chat_tokenizer(write_toy_model(tmp_path))
    say = [Script((ScriptStep(text=text),)) for text in ("Paris it is.", "Paris it is.", "Paris it was.")]
    async with (
        ScriptedEngine(chat.tokenizer, say[0]) as one,
        ScriptedEngine(chat.tokenizer, say[1]) as same,
        ScriptedEngine(chat.tokenizer, say[2]) as other,
    ):
        equal = await compare_engines(one, same, chat, tokens=40, atol=1e-6, top_k=2)
        unequal = await compare_engines(one, other, chat, tokens=40, atol=1e-6, top_k=2)

    assert (equal.is_close, equal.same_tokens, equal.largest) == (True, len(QUESTIONS), 0.0)
    assert (unequal.is_close, unequal.same_tokens) == (False, 0)
    assert {report.diverged_at for report in unequal.reports} == {len("Paris it ")}
