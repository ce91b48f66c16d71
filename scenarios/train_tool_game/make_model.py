"""Makes the model that plays: `python make_model.py OUT --seed SEED`.

A BPE tokenizer of 500 ids with merges, trained on transcripts of scripted games as one piece of text between two
markers, so that merges cross words and punctuation; and a Llama of two layers that has learned these transcripts by
cross-entropy on all tokens. On the calls alone it would not learn to copy a name: results repeat the room that was
called. The scripted player follows the marks one time in four, else it goes anywhere: the game is left to be learned.
With 500 ids each room is one token wherever it stands; some more, and it is another one behind each punctuation.

Calls are encoded with a cut here and there that merges do not cross, so that what the model samples is now and then not
what a tokenizer would make of its text.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

import torch
from game import ROOMS, STEPS, TOOLS, Game, Message
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from harness import open_chat_tokenizer

HERE = Path(__file__).parent
END, BEGIN_CALL, END_CALL = "<|im_end|>", "<tool_call>", "</tool_call>"
PAD = "<|endoftext|>"
MARKERS = (PAD, "<|im_start|>", END, BEGIN_CALL, END_CALL)
BETWEEN_MARKERS = re.compile("|".join(map(re.escape, MARKERS)))
VOCABULARY = 500
LONGEST_TOKEN = 16
"""Characters: the instruction, which is always the same, would become one token."""
FOLLOWS = 0.25
"""Probability that the scripted player goes where the marks lead; else to any room."""
CUT = 0.001
"""Probability of a cut between two characters of a call."""

STEPS_OF_LEARNING = 250
GAMES_PER_STEP = 8
RISE, PEAK, LAST = 20, 2e-3, 0.1
"""Of the learning rate: steps up, highest value, and the share of it that is left at the end."""


def main() -> None:
    """Write the model folder."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--seed", type=int, required=True)
    given = arguments.parse_args()
    torch.set_num_threads(1)  # as quick for so small a model, and steady beside other programs
    torch.manual_seed(given.seed)
    (given.out / "chat_template.jinja").write_text((HERE / "chat_template.jinja").read_text())
    (given.out / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "pad_token": PAD}))
    tokenizer = train_tokenizer(given.out)
    model = LlamaForCausalLM(shape_of(tokenizer))
    learn(model, encoded_games(given.out, tokenizer, given.seed))
    model.save_pretrained(given.out)


def train_tokenizer(out: Path) -> Tokenizer:
    """A tokenizer whose merges come from transcripts, written into `out`; the same for every seed of the model."""
    transcripts: list[str] = []
    for has_merges in (False, True):  # without them it says what the template writes
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(MARKERS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            max_token_length=LONGEST_TOKEN,
            show_progress=False,
        )
        tokenizer.train_from_iterator(transcripts, trainer)
        tokenizer.save(str(out / "tokenizer.json"))
        if not has_merges:
            games = islice(encoded_games(out, tokenizer, seed=0, cut=0.0), 200)
            texts = (tokenizer.decode(ids, skip_special_tokens=False) for ids in games)
            transcripts = [piece for text in texts for piece in BETWEEN_MARKERS.split(text)]
    return tokenizer


def shape_of(tokenizer: Tokenizer) -> LlamaConfig:
    """Half a million parameters."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.09,  # with the usual 0.02 it takes twice the steps to begin to copy
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
        dtype="float32",
    )


def encoded_games(out: Path, tokenizer: Tokenizer, seed: int, cut: float = CUT) -> Iterator[list[int]]:
    """Scripted games without end, as the ids that a session would have of them."""
    chance = random.Random(seed)  # noqa: S311  # a game, no secret
    chat = open_chat_tokenizer(out)
    instruction = (HERE / "instruction.md").read_text().strip()
    end, begin_call, end_call = (tokenizer.token_to_id(text) for text in (END, BEGIN_CALL, END_CALL))
    while True:
        messages = [{"role": "system", "content": instruction}, *walk(chance)]
        ids = chat.render_ids(messages, TOOLS)
        del ids[len(ids) - ids[::-1].index(end) :]  # the next turn's beginning
        with_cuts: list[int] = []
        while begin_call in ids:
            begin, stop = ids.index(begin_call) + 1, ids.index(end_call)
            with_cuts += ids[:begin]
            for piece in cut_anywhere(tokenizer.decode(ids[begin:stop]), cut, chance):
                with_cuts += tokenizer.encode(piece).ids
            with_cuts.append(end_call)
            ids = ids[stop + 1 :]
        yield with_cuts + ids


def walk(chance: random.Random) -> Iterator[Message]:
    """The messages of a game that the scripted player plays, without the instruction."""
    game = Game(chance.sample(ROOMS, STEPS))
    yield {"role": "user", "content": game.opening()}
    while not game.is_over:
        room = game.route[len(game.walked)] if chance.random() < FOLLOWS else chance.choice(ROOMS)
        call = {"id": "call", "type": "function", "function": {"name": "go", "arguments": json.dumps({"room": room})}}
        answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = game.go(answer)
        yield answer
        if not game.is_over:
            yield {"role": "tool", "tool_call_id": "call", "content": result}


def cut_anywhere(text: str, cut: float, chance: random.Random) -> list[str]:
    """`text` in pieces."""
    places = [0, *(place for place in range(1, len(text)) if chance.random() < cut), len(text)]
    return [text[start:stop] for start, stop in pairwise(places)]


def learn(model: LlamaForCausalLM, games: Iterator[list[int]]) -> None:
    """Train `model` on all tokens of the next games."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(STEPS_OF_LEARNING):
        rows = [torch.tensor(ids) for ids in islice(games, GAMES_PER_STEP)]
        ids = pad_sequence(rows, batch_first=True)
        labels = pad_sequence(rows, batch_first=True, padding_value=-100)
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        fall = (step - RISE) / (STEPS_OF_LEARNING - RISE)
        optimizer.param_groups[0]["lr"] = PEAK * ((step + 1) / RISE if step < RISE else 1 - (1 - LAST) * fall)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
