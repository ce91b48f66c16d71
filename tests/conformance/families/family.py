"""A model family under test: its folder, the chat tokenizer that serves it, and its plain template."""

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from harness.lab.models import resolve_model
from harness.lab.models.tokenizer_files import find_template
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.tokens.model_family import open_chat_tokenizer
from harness.tokens.templates.chat_template import ChatTemplateTokenizer
from harness.types import Message
from tests.conformance.families.packages import ASSEMBLED, SHA512, fetch_tokenizer

SMOLLM2 = "smollm2"
OURS = {f"{family}-ours": family for family in ("deepseek_v3", "mistral_nemo", *ASSEMBLED)}
"""Families with a template of this project, and whose tokenizer they have; the template has that name, too."""
_NEEDLE, _REASON = "Zq7Zq7", "Wx8Wx8"
NAMES = (SMOLLM2, *SHA512, *OURS)


@dataclass(frozen=True)
class Family:
    """One real tokenizer with its real template."""

    name: str
    folder: Path
    chat: ChatTokenizer
    """What serves the family: a renderer or its template."""
    template: ChatTemplateTokenizer

    @classmethod
    def open(cls, name: str, folder: Path) -> Self:
        """The family in `folder`, with our template where `name` is one of `OURS`."""
        ours = OURS.get(name)
        chat = open_chat_tokenizer(folder, template_file=None if ours is None else find_template(ours))
        template = chat if isinstance(chat, ChatTemplateTokenizer) else ChatTemplateTokenizer.load(folder)
        return cls(name, folder, chat, template)

    @cached_property
    def library(self) -> Tokenizer:
        """The tokenizer as its library reads it."""
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @cached_property
    def frame(self) -> str:
        """The text that the template writes between the generation prompt and the words of an answer.

        A model samples it. Empty where an answer begins with its words.
        """
        before = self.written({"content": _NEEDLE}).partition(_NEEDLE)[0]
        return before.removeprefix("<think>\n\n</think>\n\n")  # Qwen3 writes it into the last answer only

    @cached_property
    def reasoning_frame(self) -> tuple[str, str]:
        """The texts before and after reasoning, up to where the frame of the answer begins; for families with one."""
        before, _, after = self.written({"content": _NEEDLE, "reasoning_content": _REASON}).partition(_REASON)
        return before, after.partition(self.frame + _NEEDLE)[0]

    def written(self, reply: Message) -> str:
        """What the template writes for the answer `reply`, behind its own generation prompt."""
        asked: Message = {"role": "user", "content": "question"}
        template = self.template.template
        whole = template.render([asked, {"role": "assistant", **reply}], generation_prompt=False)
        return whole.removeprefix(template.render([asked]))


@cache
def load(name: str) -> Family:
    """The family `name`, fetched when it is not in the cache. Raises `OSError` or `subprocess.SubprocessError`."""
    is_smollm2 = name == SMOLLM2
    folder = resolve_model("smollm2-135m-instruct") if is_smollm2 else fetch_tokenizer(OURS.get(name, name))
    return Family.open(name, folder)
