"""One step of the torch learner is one update of AdamW, by a gradient that was scaled once; and it can be taken up."""

import copy
import math
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from harness.errors import LearnerError
from harness.training import Pack, Segment
from harness.training.learner.learner import LossKind, LossSettings, OptimizerSettings
from harness.training.learner.losses import TokenLosses, TrainedTokens, cross_entropy
from harness.training.learner.torch_learner import TorchLearner
from tests.learner.tiny_models import in_packs, some_segments, tiny_model, tiny_qwen3_vl

LOSS = LossSettings(LossKind.DECOUPLED_PPO)
SETTINGS = OptimizerSettings(learning_rate=0.01, weight_decay=0.1, clip_norm=0.5)


def weights(model: Any) -> torch.Tensor:
    """All of them, flat."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def new_learner(settings: OptimizerSettings = SETTINGS, **more: Any) -> tuple[Any, TorchLearner, list[Pack]]:
    """A model, its learner, and three packs of what it might have sampled."""
    model = tiny_model()
    packs = in_packs(some_segments(model), 3)
    return model, TorchLearner(model, LOSS, settings, **more), packs


def as_before(learner: TorchLearner, model: Any, packs: list[Pack]) -> tuple[list[float], torch.Tensor]:
    """The figures of two steps, and the weights after them."""
    figures = []
    for pack in packs[:2]:
        figures += learner.finish_step(learner.accumulate(pack).trained_tokens).telemetry().values()
    return figures, weights(model)


def test_a_step_is_one_update_by_the_gradient_that_is_normalized_and_then_clipped() -> None:
    """The same as torch does it, with the gradient divided by the normalizer."""
    model, learner, packs = new_learner()
    other = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(3):
        tokens = sum(learner.accumulate(pack).trained_tokens for pack in packs)
        for parameter, mine in zip(other.parameters(), model.parameters(), strict=True):
            parameter.grad = mine.grad / tokens
        norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        optimizer.step()
        report = learner.finish_step(tokens)
        assert report.gradient_norm == pytest.approx(float(norm))
        assert (report.step, report.packs, report.sums.trained_tokens) == (step + 1, 3, tokens)
        torch.testing.assert_close(weights(model), weights(other), rtol=1e-4, atol=1e-7)
    assert report.gradient_norm > 0.5, "nothing was clipped"


def test_the_normalizer_divides_once() -> None:
    """Packs given twice, with a normalizer of twice the size, move the weights as given once."""
    once, twice = new_learner(), new_learner()
    for (model, learner, packs), times in ((once, 1), (twice, 2)):
        for pack in packs * times:
            learner.accumulate(pack)
        learner.finish_step(50.0 * times)
        assert model.training is False
    torch.testing.assert_close(weights(once[0]), weights(twice[0]), rtol=1e-9, atol=1e-12)


def test_each_pack_may_come_from_another_thread() -> None:
    """A collector hands packs over from a pool of threads, one at a time."""
    model, learner, packs = new_learner()
    expected = as_before(*new_learner()[1::-1], packs)
    figures = []
    for pack in packs[:2]:
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            sums = one.submit(learner.accumulate, pack).result()
            figures += other.submit(learner.finish_step, sums.trained_tokens).result().telemetry().values()
    assert figures == pytest.approx(expected[0])
    torch.testing.assert_close(weights(model), expected[1])


def test_a_schedule_moves_the_learning_rate() -> None:
    """It is asked with the number of finished steps, and a rate of 0 changes no weight."""
    model, learner, packs = new_learner(schedule=lambda step: step / 2)
    before = weights(model)
    learner.accumulate(packs[0])
    assert learner.finish_step(9).learning_rate == 0
    assert torch.equal(weights(model), before)
    learner.accumulate(packs[0])
    assert learner.finish_step(9).learning_rate == pytest.approx(0.005)
    assert not torch.equal(weights(model), before)


def test_a_step_without_a_trained_token_moves_nothing() -> None:
    """Not even by the momentum of the one before; it counts, and its normalizer may be 0."""
    model, learner, packs = new_learner()
    as_before(learner, model, packs)
    before = weights(model)
    untrained = Segment.of_tokens([4, 5, 6], [0, 0, 0])
    assert learner.accumulate(Pack.of([untrained], [0])).trained_tokens == 0
    report = learner.finish_step(0)
    assert (report.step, report.packs, report.gradient_norm) == (3, 1, 0.0)
    assert torch.equal(weights(model), before)


def absurd(pack: Pack) -> Pack:
    """A pack of one segment, whose probability has grown by e^100000."""
    segment = pack.segments()[0]
    behavior = np.where(segment.behavior_versions >= 0, -1e5, 0.0)
    spoiled = replace(
        segment,
        advantages=-abs(segment.advantages) - 1,
        behavior_logprobs=behavior,
        proximal_logprobs=behavior,
        proximal_versions=segment.behavior_versions,
    )
    return Pack.of([spoiled], [0])


@pytest.mark.parametrize(
    ("normalizer", "words"),
    [*((each, "normalizer") for each in (0.0, -3.0, math.nan, math.inf)), (1.0, "not finite"), (None, "")],
)
def test_a_step_that_is_given_up_trains_nothing(normalizer: float | None, words: str) -> None:
    """For its normalizer or its gradient, or by a collector that failed; the next step has nothing of it."""
    model, learner, packs = new_learner()
    expected = as_before(*new_learner()[1::-1], packs)
    learner.accumulate(absurd(packs[0]) if words == "not finite" else packs[2])
    if normalizer is None:
        learner.discard_step()
    else:
        with pytest.raises(LearnerError, match=words):
            learner.finish_step(normalizer)
    assert learner.step == 0
    figures, after = as_before(learner, model, packs)
    assert figures == expected[0]
    assert torch.equal(after, expected[1])


def test_it_goes_on_from_its_state_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    """Weights, moments and schedule: the same figures, bit by bit."""
    model, learner, packs = new_learner(schedule=lambda step: 1 / (step + 1))
    as_before(learner, model, packs)
    learner.save_state(tmp_path / "state")
    other, successor, _ = new_learner(schedule=lambda step: 1 / (step + 1))
    successor.accumulate(packs[2])
    successor.load_state(tmp_path / "state")
    assert successor.step == 2
    (figures, after), (others, others_after) = as_before(learner, model, packs), as_before(successor, other, packs)
    assert figures == others
    assert torch.equal(after, others_after)


def test_a_state_of_something_else_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """Of another shape, of other settings, or none at all."""
    model, learner, _ = new_learner()
    learner.save_state(tmp_path / "state")
    wider = TorchLearner(tiny_model(intermediate_size=32), LOSS, SETTINGS)
    with pytest.raises(LearnerError, match=r"another model: .* has shape \(16, 24\), expected \(16, 32\)"):
        wider.load_state(tmp_path / "state")
    with pytest.raises(LearnerError, match="learning_rate"):
        new_learner(replace(SETTINGS, learning_rate=0.02))[1].load_state(tmp_path / "state")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "learner_state.pt").write_bytes(b"half of it")
    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage" / "learner_state.pt").write_bytes(bytes(range(1, 200)))
    before = weights(model)
    for folder in ("broken", "garbage", "nowhere"):
        with pytest.raises(LearnerError, match=folder):
            learner.load_state(tmp_path / folder)
    assert torch.equal(weights(model), before)


def test_saved_weights_are_a_model_folder(tmp_path: Path) -> None:
    """Any program loads it with the same weights; the tokenizer's files come along, older weights do not."""
    source = tmp_path / "source"
    tiny_model(dtype=torch.float32).save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    learner = TorchLearner.open(source, LOSS, SETTINGS)
    packs = in_packs(some_segments(tiny_model()), 1)
    learner.finish_step(learner.accumulate(packs[0]).trained_tokens)
    learner.save(tmp_path / "1")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "1")
    before = transformers.AutoModelForCausalLM.from_pretrained(source)
    assert saved.dtype == torch.float32
    assert not torch.equal(weights(saved), weights(before))
    successor = TorchLearner.open(tmp_path / "1", LOSS, SETTINGS)
    assert successor.accumulate(packs[0]).loss == learner.accumulate(packs[0]).loss
    assert {"tokenizer.json", "chat_template.jinja"} <= {path.name for path in (tmp_path / "1").iterdir()}


def test_a_model_of_text_and_images_is_opened_as_what_it_is(tmp_path: Path) -> None:
    """Transformers has no causal language model for its folder; a step on packs of four rows moves its text."""
    tiny_qwen3_vl().float().save_pretrained(tmp_path / "model")
    learner = TorchLearner.open(tmp_path / "model", LOSS, SETTINGS)
    before = weights(learner.model)
    [pack] = in_packs(some_segments(tiny_model()), 1, position_rows=4)
    learner.finish_step(learner.accumulate(pack).trained_tokens)
    assert type(learner.model).__name__ == "Qwen3VLForConditionalGeneration"
    assert not torch.equal(weights(learner.model), before)


@pytest.mark.parametrize("verb", ["save", "save_state"])
def test_what_cannot_be_written_is_an_error_and_leaves_no_folder(verb: str, tmp_path: Path) -> None:
    """Files that the disk has no room for; it continues afterwards."""
    _, learner, _ = new_learner()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        with pytest.raises(LearnerError, match="cannot be written"):
            getattr(learner, verb)(tmp_path / "1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    getattr(learner, verb)(tmp_path / "1")
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """By name."""
    with pytest.raises(LearnerError, match="nothing"):
        TorchLearner.open(tmp_path / "nothing", LOSS, SETTINGS)


def test_parameters_of_half_precision_are_refused() -> None:
    """A sum over thousands of tokens would lose the small gradients."""
    with pytest.raises(LearnerError, match="float32"):
        TorchLearner(tiny_model(dtype=torch.bfloat16), LOSS, SETTINGS)


def test_matrix_products_may_be_of_half_precision() -> None:
    """The gradient is that of float32, roughly; the parameters stay what they are."""
    gradients = []
    for autocast in (None, torch.bfloat16):
        model = tiny_model(dtype=torch.float32, initializer_range=0.1)
        packs = in_packs(some_segments(model), 1)
        learner = TorchLearner(model, LossSettings(LossKind.CROSS_ENTROPY), SETTINGS, autocast=autocast)
        learner.accumulate(packs[0])
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    exact, rough = gradients
    assert rough.dtype == torch.float32
    assert 0 < float((exact - rough).norm() / exact.norm()) < 0.1


def test_a_loss_of_ones_own_is_a_function() -> None:
    """It gets the trained tokens of a pack and says what each of them loses."""

    def halved(tokens: TrainedTokens) -> TokenLosses:
        losses = cross_entropy(tokens, LossSettings())
        return losses._replace(loss=losses.loss / 2)

    model = tiny_model()
    pack = in_packs(some_segments(model), 1)[0]
    sums = [
        TorchLearner(tiny_model(), loss, SETTINGS).accumulate(pack).loss
        for loss in (LossSettings(LossKind.CROSS_ENTROPY), halved)
    ]
    assert sums[1] == pytest.approx(sums[0] / 2)


def test_whole_rows_are_learned_by_cross_entropy() -> None:
    """Tokens that nobody sampled, all trained: after some steps the model says them by itself."""
    model = tiny_model(dtype=torch.float32, initializer_range=0.02)
    learner = TorchLearner(model, LossSettings(LossKind.CROSS_ENTROPY), replace(SETTINGS, clip_norm=math.inf))
    pack = Pack.of([Segment.of_tokens([3, 1, 4, 1, 5, 9, 2, 6]), Segment.of_tokens([3, 5, 8, 9, 7, 9, 3])], [0, 1])
    reports = [learner.finish_step(learner.accumulate(pack).trained_tokens) for _ in range(60)]
    first, last = (reports[at].telemetry()["train/loss"] for at in (0, -1))
    assert first > 3.5
    assert last < 1.0
    assert reports[0].telemetry()["train/ratio_mean"] == 0.0
