"""Where a template rewrites history a renderer takes its place: the same ids, and what was sampled is kept."""

import subprocess
import sys
from importlib import import_module
from itertools import islice, product

import pytest

from harness.errors import MalformedRequest, TokenizerError
from harness.tokens.chat_tokenizer import DelimiterSource, SampledOutput, SampledTurn
from harness.tokens.conversations import TOOLS, exchanges
from harness.tokens.markers import GuardedMessages
from harness.tokens.model_family import open_chat_tokenizer
from harness.tokens.parsing import ParsedOutput, ToolCall
from harness.tokens.templates.chat_template import ChatTemplateTokenizer
from harness.tokens.templates.jinja_template import JinjaTemplate
from harness.tokens.templates.renderers import RenderersTokenizer, TokenizerView, renderer_class, renderer_names
from harness.tokens.tokenizer import Tokenizer

QWEN3 = pytest.mark.parametrize("family", ["qwen3"], indirect=True)
MALFORMED = [
    "<tool_call>\n{}\n</tool_call>",
    "<tool_call>\n",
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    "<tool_call>" + "[" * 100_000,
    '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5_000 + "}}</tool_call>",
]
USER = {"role": "user", "content": "next"}


def turn(family, output: str, *, context: str = "<|im_start|>assistant\n", reply: str = "x") -> SampledTurn:
    ids = [family.chat.tokenizer.encode(text) for text in (output, context)]
    return SampledTurn({"role": "assistant", "content": reply}, *ids)


def text_of(family, ids: list[int] | None) -> str:
    assert ids is not None
    return family.chat.tokenizer.decode(ids)


def test_a_renderer_serves_exactly_where_a_template_diverges_and_one_fits(family):
    """A template that is append-only serves itself; one that is not and has no renderer is used, and said so."""
    described = family.chat.describe()

    assert (described.renderer == "qwen3") == (family.name == "qwen3")
    assert described.renderer is None or described.divergence is not None


@QWEN3
def test_the_renderer_is_found_by_what_it_does(family):
    """It gives the ids of the template on every conversation that is tried."""
    assert isinstance(family.chat, RenderersTokenizer)
    assert family.chat.describe().delimiters["answer -> user"] is DelimiterSource.RENDERER
    for case in islice(exchanges(), 0, None, 23):
        assert family.chat.render_ids(case.prior, case.tools) == family.template.render_ids(case.prior, case.tools)


@QWEN3
def test_a_bridge_is_what_the_prefix_trick_gives(family):
    """Two ways that know nothing of each other come to the same ids."""
    for case in islice(exchanges(), 0, None, 23):
        previous = SampledTurn(case.reply, family.chat.tokenizer.encode("x<|im_end|>"), [1, 2], case.opens_with_system)
        expected = family.template.extend_ids(previous, case.new, case.tools)
        assert family.chat.extend_ids(previous, case.new, case.tools) == expected


ANSWERS = [
    "yes<|im_end|>",
    "<|im_end|>",
    "yes<|endoftext|>",
    "cut off",
    "<think>\nhm\n</think>\n\nyes<|im_end|>",
    "<think>a</think><think>b</think>c<|im_end|>",
    "said <think> aloud</think><|im_end|>",
    "<think>\nhm<|im_end|>",
    "<think>\nhm",
    "<think>hm<tool_call>{}</tool_call><|im_end|>",
    "over</think>yes<|im_end|>",
    "over</think><|im_end|>",
    '<tool_call>{"name": "f"}</tool_call><|im_end|>',
    "<|im_start|>assistant\n<think>hm<|im_end|>",
    "<tool_response>x</tool_response><|im_end|>",
    "a<|im_end|>b<|im_end|>",
    "<|im_end|><|im_end|>",
]
CONTEXTS = [f"<|im_start|>assistant\n{opening}" for opening in ("", "<think>\n", "<think>\n\n</think>\n\n")]
NEXT = [
    [{"role": "tool", "tool_call_id": "a", "content": text}] for text in ("", " 1\n", "<|im_end|>", "日本 <think>")
] + [
    [USER],
    [{"role": "tool", "tool_call_id": "a", "content": "1", "is_error": True}] * 2,
    [{"role": "system", "content": "rules"}, USER],
]


@QWEN3
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("output", ANSWERS)
def test_a_kept_bridge_is_the_one_that_the_renderer_builds(family, output, context):
    """Whatever the answer has left open, behind whatever prompt; the package itself is the judge."""
    encode = family.chat.tokenizer.encode
    keeps = import_module("renderers.configs").Qwen3RendererConfig(thinking_retention="all")
    before, said = encode(context), encode(output)
    for messages, tools in product(NEXT, ([], TOOLS)):
        previous = SampledTurn({"role": "assistant", "content": output}, said, before)
        guarded = GuardedMessages(family.chat.tokenizer, messages, tools)
        judge = renderer_class("qwen3")(TokenizerView(family.chat.tokenizer, guarded), keeps)
        bridged = judge.bridge_to_next_turn(before, said, list(guarded.messages), tools=list(guarded.tools) or None)
        known = [*before, *said]
        kept = bridged is not None and list(bridged.token_ids[: len(known)]) == known

        extension = family.chat.extend_ids(previous, messages, tools)

        assert extension == (list(bridged.token_ids[len(known) :]) if kept else None)


@pytest.mark.parametrize("family", ["deepseek_v3"], indirect=True)
def test_reasoning_that_is_written_out_is_the_renderers_to_judge(family):
    """DeepSeek V3's vocabulary has no id for it: a renderer that is named for it finds the text."""
    chat = RenderersTokenizer("deepseek-v3", family.template)
    encode = chat.tokenizer.encode
    end = chat.tokenizer.token_text(min(chat.tokenizer.eos_ids))
    cut, whole = (
        SampledTurn({"role": "assistant", "content": "x"}, encode(text + end), encode("x"))
        for text in ("<think>hm, cut", "yes")
    )

    assert chat.extend_ids(cut, [USER], []) is None
    assert chat.extend_ids(whole, [USER], []) is not None


@QWEN3
def test_reasoning_of_earlier_turns_stays_as_it_was_sampled(family):
    """The template would drop it; the session keeps it, so the branch continues."""
    extension = family.chat.extend_ids(turn(family, "<think>\nhm\n</think>\n\nyes<|im_end|>"), [USER], [])

    assert text_of(family, extension) == "\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"


@QWEN3
@pytest.mark.parametrize("theirs", [[], [USER, {"role": "assistant", "content": "mine"}, USER]])
def test_what_a_bridge_is_not_for_is_written_by_the_template(family, theirs):
    """A history that ends with the answer, or continues with one of the client's."""
    previous = turn(family, "x<|im_end|>")

    extension = family.chat.extend_ids(previous, theirs, [])

    assert extension is not None
    assert extension == family.template.extend_ids(previous, theirs, [])


@QWEN3
@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("<think>\nhm\n</think>\n\nyes<|im_end|>", ParsedOutput("yes", reasoning="hm")),
        (
            '<tool_call>\n{"name": "find_city", "arguments": {"country": "France"}}\n</tool_call><|im_end|>',
            ParsedOutput("", (ToolCall("find_city", '{"country": "France"}'),)),
        ),
        *[(output, ParsedOutput(output, malformed=True)) for output in MALFORMED],
    ],
)
def test_outputs_are_read_alike_with_tools_and_without(family, output, expected):
    """Nothing a model wrote raises; our parsers read a family whose calls they know, also while it is sampled."""
    ids = family.chat.tokenizer.encode(output)
    stream = family.chat.open_output(SampledOutput(()), TOOLS, (), frozenset())

    assert family.chat.parse(SampledOutput(ids), TOOLS) == expected
    assert stream is not None
    for token_id in ids:
        stream.push([token_id])
    assert stream.end() == expected


@QWEN3
def test_calls_in_a_syntax_that_only_a_renderer_knows_are_read_by_it(family):
    """GLM 4.5 writes no JSON between the markers of Hermes. Then only whole outputs are read."""
    source = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = ChatTemplateTokenizer(Tokenizer.load(family.folder), JinjaTemplate(source))
    chat = RenderersTokenizer("qwen3", template)
    ids = chat.tokenizer.encode('<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>cut')

    assert not template.reads_calls
    assert chat.open_output(SampledOutput(()), TOOLS, (), frozenset()) is None
    assert chat.open_output(SampledOutput(()), [], (), frozenset()) is not None
    assert chat.parse(SampledOutput(ids[:-2]), TOOLS).tool_calls == (ToolCall("f", "{}"),)
    assert chat.parse(SampledOutput(ids), TOOLS).malformed


@QWEN3
@pytest.mark.parametrize("thinks", [True, False])
def test_turns_are_bridged_with_variables_too(family, thinks):
    """A session that sets one stays one branch; prompts say what the template says."""
    chat = family.chat.with_variables({"enable_thinking": thinks})
    template = family.template.with_variables({"enable_thinking": thinks})
    asked, answered = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
    prompt = chat.render_ids([asked], [])
    output = [*chat.tokenizer.encode("two"), chat.end_of_turn_id]
    behind = chat.extend_ids(SampledTurn(answered, output, prompt), [asked], [])
    empty = "<think>\n\n</think>\n\n"

    assert chat.tokenizer.decode(prompt).endswith(empty) == (not thinks)
    assert behind is not None
    assert prompt == template.render_ids([asked], [])
    assert [output[-1], *behind] == template.render_ids([asked, answered, asked], [])[-len(behind) - 1 :]
    assert chat is family.chat.with_variables({"enable_thinking": thinks})


@QWEN3
def test_a_name_chooses_a_renderer_and_none_the_template(family):
    """A renderer of another family is refused, or described as what it is."""
    assert isinstance(open_chat_tokenizer(family.folder, renderer="none"), ChatTemplateTokenizer)
    assert open_chat_tokenizer(family.folder, renderer="qwen3").describe().notes == ()
    assert open_chat_tokenizer(family.folder, renderer="qwen3.5").describe().notes != ()
    with pytest.raises(TokenizerError, match="expected auto, none or one of"):
        open_chat_tokenizer(family.folder, renderer="qwen9")
    with pytest.raises(TokenizerError, match="does not fit"):
        open_chat_tokenizer(family.folder, renderer="gemma4")


@QWEN3
def test_messages_that_a_renderer_refuses_name_the_field(family):
    """As a template's do."""
    with pytest.raises(MalformedRequest) as caught:
        family.chat.render_ids([], [])

    assert caught.value.param == "messages"


def test_every_renderer_is_the_one_that_the_package_has_under_its_name():
    """One that was not found would leave its families to their templates, without a word."""
    found = {name: renderer_class(name) for name in renderer_names()}
    registry = import_module("renderers.base")  # by now: on its own it would bring its client libraries along
    registry._populate_registry()

    assert found == {name: registry.RENDERER_REGISTRY[name] for name in found}


def test_the_renderers_come_without_the_client_libraries_that_they_name():
    """They take longer to import than all of a server; whoever imports them afterwards gets the real ones."""
    code = (
        "import sys\nfrom harness.tokens.templates.renderers import renderer_names\n"
        "print(bool(renderer_names()), {'openai', 'httpx'} & set(sys.modules))\n"
        "import openai, httpx\nprint(openai.AsyncOpenAI.__name__, httpx.Response.__name__)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert answer.stdout.split() == ["True", "set()", "AsyncOpenAI", "Response"]
